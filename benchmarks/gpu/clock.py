"""Timing of work that a device executes asynchronously."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

REPEATS = 5
"""Timed calls per variant; medians are reported."""


def synchronize(device: str) -> None:
    """Wait until the device has finished all queued work."""
    if device == "cuda":
        torch.cuda.synchronize()


def medians(calls: Sequence[Callable[[], object]], device: str, repeats: int = REPEATS) -> list[float]:
    """Return the median seconds of each call; calls alternate after a warm-up."""
    times: list[list[float]] = [[] for _ in calls]
    for repeat in range(repeats + 1):
        for call, seconds in zip(calls, times, strict=True):
            synchronize(device)
            start = time.perf_counter()
            call()
            synchronize(device)
            if repeat:
                seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds) for seconds in times]


def product_flops(device: str, edge: int = 8192, dtype: torch.dtype = torch.bfloat16) -> float:
    """Measure FLOP per second of a large matrix product: the reachable rate, as opposed to the specified one."""
    left, right = (torch.randn(edge, edge, device=device).to(dtype) for _ in range(2))
    out = torch.empty(edge, edge, dtype=dtype, device=device)
    (seconds,) = medians([lambda: torch.mm(left, right, out=out)], device)
    return 2 * edge**3 / seconds
