"""Chunks of fake producers."""

from __future__ import annotations

from typing import Any

import numpy as np

from mcore_rl.runtime.delivery import Chunk, Part, TrajectoryPlace
from mcore_rl.types import BuffersRef, RolloutTask, SamplingOptions

ROWS = 10
NONE = np.empty(0, np.int64)
TASK = RolloutTask("train", NONE, NONE, 1, SamplingOptions(4), 1)


def chunk(producer: str, process: Any, key: int) -> BuffersRef:
    return BuffersRef(Chunk([Part(TrajectoryPlace(producer, process, key), 0, ROWS, (0, ROWS))], TASK))
