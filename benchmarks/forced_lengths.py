"""Makes a run's engine end responses where the benchmark wants it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mcore_rl.ports import Engine
from mcore_rl.types import Completion, GenerationRequest


class ForcedLengths(Engine):
    """An Engine whose call k gives response i lengths[k][i] tokens; the end token must be one that the model
    never draws."""

    def __init__(self, engine: Engine, lengths: Sequence[np.ndarray]) -> None:
        self._engine = engine
        self._lengths: Iterator[np.ndarray] = iter(lengths)

    @property
    def weight_version(self) -> int:
        return self._engine.weight_version

    def generate(self, requests: Sequence[GenerationRequest], on_finish: Callable[[Completion], None]) -> None:
        wanted = next(self._lengths).tolist()
        forced = [
            replace(request, sampling=replace(request.sampling, max_response_tokens=length))
            for request, length in zip(requests, wanted, strict=True)
        ]
        self._engine.generate(forced, on_finish)

    def sleep(self, *, keep_weights: bool) -> int:
        return self._engine.sleep(keep_weights=keep_weights)

    def wake_up(self, part: str) -> None:
        self._engine.wake_up(part)

    def shutdown(self) -> None:
        self._engine.shutdown()


def force_lengths(process: Any, lengths: Sequence[np.ndarray]) -> None:
    """Runs inside the engine's process (runtime.processes.EngineProcess)."""
    process.worker.engine = ForcedLengths(process.worker.engine, lengths)
