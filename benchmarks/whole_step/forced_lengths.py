"""Forced response lengths for the engine of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """EngineLoop that gives sample s of training group g lengths[g * samples + s] tokens, on whichever engine it runs.
    The model must never sample the end token.

    Shapes: lengths int64 [responses of all steps].
    """

    def __init__(self, loop: EngineLoop, lengths: np.ndarray, samples: int) -> None:
        self._loop = loop
        self._lengths = lengths
        self._samples = samples

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        on_finish: Callable[[Completion], None],
        begun: Callable[[], None],
    ) -> None:
        self._loop.generate([self._forced(request) for request in requests], on_finish, begun)

    def _forced(self, request: GenerationRequest) -> GenerationRequest:
        # RolloutTask.request_id
        _, group, sample = request.request_id.split(".")
        length = int(self._lengths[int(group) * self._samples + int(sample)])
        return replace(request, sampling=replace(request.sampling, max_response_tokens=length))

    def take_over(self, responses: Sequence[JournaledResponse]) -> Future[None]:
        return self._loop.take_over(responses)

    def withdraw(self, choose: Choose) -> None:
        self._loop.withdraw(choose)


def force_lengths(process: EngineProcess, lengths: np.ndarray, samples: int) -> None:
    """Force the lengths; called in the engine's process (runtime.engines.process.EngineProcess)."""
    # The task runner withdraws requests through the player of tasks.
    player = process._runner._withdraw.__self__  # type: ignore[attr-defined]
    player._loop = ForcedLengthGenerator(player._loop, lengths, samples)
