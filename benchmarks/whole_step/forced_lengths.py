"""Forced response lengths for the engine of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from mcore_rl.rollout.journal import JournaledResponse
from mcore_rl.rollout.loop import Choose, EngineLoop
from mcore_rl.types import Completion, GenerationRequest

if TYPE_CHECKING:
    from mcore_rl.runtime.engines.process import EngineProcess


class ForcedLengthGenerator:
    """EngineLoop whose call k gives response i lengths[k][i] tokens. The model must never sample the end token."""

    def __init__(self, loop: EngineLoop, lengths: Sequence[np.ndarray]) -> None:
        self._loop = loop
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
        self._loop.generate(forced, on_finish, begun)

    def take_over(self, responses: Sequence[JournaledResponse]) -> Future[None]:
        return self._loop.take_over(responses)

    def withdraw(self, choose: Choose) -> None:
        self._loop.withdraw(choose)


def force_lengths(process: EngineProcess, lengths: Sequence[np.ndarray]) -> None:
    """Force the lengths; called in the engine's process (runtime.engines.process.EngineProcess)."""
    # The task runner withdraws requests through the player of tasks.
    player = process._runner._withdraw.__self__  # type: ignore[attr-defined]
    player._loop = ForcedLengthGenerator(player._loop, lengths)
