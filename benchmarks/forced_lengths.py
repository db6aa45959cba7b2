"""Makes a run's engine end responses where the benchmark wants it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mcore_rl.rollout.episodes.single_turn import Generator
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


def force_lengths(process: Any, lengths: Sequence[np.ndarray]) -> None:
    """Runs inside the engine's process (runtime.roles.engine.EngineProcess)."""
    process._worker._generator = ForcedLengths(process._worker._generator, lengths)
