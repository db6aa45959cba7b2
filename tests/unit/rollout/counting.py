"""Sampler for tests of collectors."""

from __future__ import annotations

import numpy as np


class CountingSampler:
    """Samples rows 0, 1, 2, ..., so that the sampled rows are easy to check."""

    def __init__(self) -> None:
        self.next = 0

    def draw(self, count: int) -> np.ndarray:
        rows = np.arange(self.next, self.next + count)
        self.next += count
        return rows
