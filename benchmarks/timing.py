"""Time and memory of calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path


def seconds_of(call: Callable[[], object], repeats: int = 1) -> float:
    """Return the mean duration of a call."""
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - started) / repeats


def alternating(calls: Sequence[Callable[[], object]], repeats: int) -> list[list[float]]:
    """Return the durations of each call; the calls alternate, so that other load affects all of them."""
    rounds = [[seconds_of(call) for call in calls] for _ in range(repeats)]
    return [list(seconds) for seconds in zip(*rounds, strict=True)]


def medians(calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Return the median duration of each call; the calls alternate after a warm-up."""
    alternating(calls, 1)  # compiles kernels and fills caches
    return [statistics.median(seconds) for seconds in alternating(calls, repeats)]


def reset_peak() -> None:
    """Set the peak of this process's resident memory, VmHWM, to the current value (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def memory_bytes(key: str) -> int:
    """Return VmRSS or VmHWM: resident memory of this process, or its peak (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])


def peak_increase(call: Callable[[], object]) -> int:
    """Return the bytes by which the resident memory grew at most during a call."""
    reset_peak()
    before = memory_bytes("VmRSS")
    call()
    return max(memory_bytes("VmHWM") - before, 0)
