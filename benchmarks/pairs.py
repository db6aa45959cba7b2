"""Two ways to move the same bytes, timed alternately in one process. Peak memory is measured in a separate process."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.children import Child
from benchmarks.result import Result
from benchmarks.sizes import size

ROUNDS = size(15, 1)
SHORTEST_SECONDS = size(0.05, 0.0)
"""Minimum duration of a timed round; a single copy of 20 MB is shorter than its noise."""


@dataclass(frozen=True)
class Pair:
    """Two ways to move the same bytes. `local` has the tensors that `ours` fills, for checks of the result."""

    ours: Callable[[], object]
    limit: Callable[[], object]
    num_bytes: int
    local: dict[str, torch.Tensor] = field(default_factory=dict)


def pair_row(name: str, aim: str, make: Callable[..., Pair], *arguments: Any) -> Result:
    """Measure the pair that `make(*arguments)` returns: the time here, the memory of each side in its own process."""
    pair = make(*arguments)
    ratio, seconds = alternate(pair)
    rate = pair.num_bytes / seconds / 1e9
    peaks = {side: peak_bytes(make, arguments, side) for side in ("ours", "limit")}
    note = ", ".join(f"{side} needs {peak / 2**20:.0f} MiB beyond its buffers" for side, peak in peaks.items())
    title = f"{name}, {pair.num_bytes / 1e6:.0f} MB"
    return Result(title, rate, rate / ratio, "GB/s", ratio, aim, note)


def alternate(pair: Pair) -> tuple[float, float]:
    """Time both sides alternately. Returns the median of limit / ours, and the median seconds of ours. The first round
    is a warm-up; its duration determines how often a short action is repeated per timed round."""
    repeats = max(1, round(SHORTEST_SECONDS / max(_timed(pair.limit, 1), _timed(pair.ours, 1))))
    ratios, ours = [], []
    for _ in range(ROUNDS):
        seconds = [_timed(pair.limit, repeats), _timed(pair.ours, repeats)]
        ratios.append(seconds[0] / seconds[1])
        ours.append(seconds[1])
    return statistics.median(ratios), statistics.median(ours)


def _timed(action: Callable[[], object], repeats: int) -> float:
    started = time.perf_counter()
    for _ in range(repeats):
        action()
    return (time.perf_counter() - started) / repeats


def peak_bytes(make: Callable[..., Pair], arguments: tuple[Any, ...], side: str) -> int:
    """Measure the increase of peak resident memory during one call of a side, in a new process."""
    context = multiprocessing.get_context("spawn")
    child = Child(context, _measure_peak, make, arguments, side)
    try:
        return int(child.recv())
    finally:
        child.end()


def _measure_peak(pipe: Connection, make: Callable[..., Pair], arguments: tuple[Any, ...], side: str) -> None:
    torch.set_num_threads(1)
    action = getattr(make(*arguments), side)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak of resident memory
    before = _status("VmRSS")
    action()
    pipe.send(max(_status("VmHWM") - before, 0))


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])
