"""Makes a run's engine end responses where the benchmark wants it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from mcore_rl.rollout.episodes.single_turn import Generator
from mcore_rl.rollout.journal import JournaledResponse
from mcore_rl.rollout.loop import Choose
from mcore_rl.types import Completion, GenerationRequest


class ForcedLengths:
    """A Generator whose call k gives response i lengths[k][i] tokens; the end token must be one that the model never
    draws."""

    def __init__(self, generator: Generator, lengths: Sequence[np.ndarray]) -> None:
        self._generator = generator
        self._lengths: Iterator[np.ndarray] = iter(lengths)

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        on_finish: Callable[[Completion], None],
        begun: Callable[[], None],
    ) -> None:
        wanted = next(self._lengths).tolist()
        forced = [
            replace(request, sampling=replace(request.sampling, max_response_tokens=length))
            for request, length in zip(requests, wanted, strict=True)
        ]
        self._generator.generate(forced, on_finish, begun)

    def take_over(self, responses: Sequence[JournaledResponse]) -> Future[None]:
        return self._generator.take_over(responses)

    def withdraw(self, choose: Choose) -> None:
        self._generator.withdraw(choose)


def force_lengths(process: Any, lengths: Sequence[np.ndarray]) -> None:
    """Runs inside the engine's process (runtime.roles.engine.EngineProcess)."""
    player = process._runner._run.__self__._player
    player._generator = ForcedLengths(player._generator, lengths)
