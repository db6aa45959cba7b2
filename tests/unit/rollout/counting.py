"""A sampler for tests of collectors."""

from __future__ import annotations

import numpy as np


class CountingSampler:
    """Rows 0, 1, 2, ...: what was drawn can be read off the rows."""

    def __init__(self) -> None:
        self.next = 0

    def draw(self, count: int) -> np.ndarray:
        rows = np.arange(self.next, self.next + count)
        self.next += count
        return rows
