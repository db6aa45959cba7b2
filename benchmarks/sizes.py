"""Sizes of benchmarks: full ones, or the smallest that still go through everything (`--smallest`)."""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")
SMALLEST = "MCORE_RL_BENCH_SMALLEST"
"""Environment variable that asks for the smallest sizes; child processes inherit it."""


def size(full: T, smallest: T) -> T:
    """The value of a module constant in this process."""
    return smallest if os.environ.get(SMALLEST) == "1" else full
