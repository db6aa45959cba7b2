"""Sizes of benchmarks: full, or the smallest that still run all code (`--smallest`)."""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")
SMALLEST = "MCORE_RL_BENCH_SMALLEST"
"""Environment variable that selects the smallest sizes; child processes inherit it."""


def size(full: T, smallest: T) -> T:
    """Select the value of a module constant."""
    return smallest if os.environ.get(SMALLEST) == "1" else full
