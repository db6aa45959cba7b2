"""Timing of work that a device executes asynchronously."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from benchmarks import timing
from benchmarks.sizes import size

EDGE = size(8192, 256)
REPEATS = 5
"""Timed calls per variant; medians are reported."""


def synchronize(device: str) -> None:
    """Wait until the device has finished all queued work."""
    if device == "cuda":
        torch.cuda.synchronize()


def medians(calls: Sequence[Callable[[], object]], device: str, repeats: int = REPEATS) -> list[float]:
    """Return the median seconds of each call; calls alternate after a warm-up."""

    def complete(call: Callable[[], object]) -> None:
        call()
        synchronize(device)

    return timing.medians([partial(complete, call) for call in calls], repeats)


def product_flops(device: str) -> float:
    """Measure FLOP per second of a large bfloat16 matrix product, the reachable rate."""
    left, right = (torch.randn(EDGE, EDGE, device=device).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    (seconds,) = medians([lambda: torch.mm(left, right, out=out)], device)
    return 2 * EDGE**3 / seconds
