"""Chunks of fake producers, and a Watch whose calls have ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mcore_rl.runtime.delivery import Chunk, Part, TrajectoryPlace
from mcore_rl.types import BuffersRef, RolloutTask, SamplingOptions

ROWS = 10
NONE = np.empty(0, np.int64)
TASK = RolloutTask("train", NONE, NONE, 1, SamplingOptions(4), 1)


class EndedWatch:
    """Fake Watch. The reference of a call is its result."""

    dependent_seconds = 1.0

    def get(self, references: Sequence[object], needs: Sequence[object] = ()) -> list[object]:
        return list(references)


def chunk(producer: str, process: Any, key: int) -> BuffersRef:
    return BuffersRef(Chunk([Part(TrajectoryPlace(producer, process, key), 0, ROWS, (0, ROWS))], TASK))
