"""Two ways to move the same bytes, timed alternately in one process. Peak memory is measured in a separate process."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import torch

from benchmarks.children import PipedChild
from benchmarks.result import Result
from benchmarks.sizes import size
from benchmarks.timing import peak_increase, seconds_of

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


def pair_row(name: str, aim: str, make: Callable[..., Pair], *arguments: object) -> Result:
    """Measure the pair that `make(*arguments)` returns: the time here, the memory of each side in its own process."""
    pair = make(*arguments)
    ratio, seconds = alternate(pair.ours, pair.limit)
    rate = pair.num_bytes / seconds / 1e9
    peaks = {side: peak_bytes(make, arguments, side) for side in ("ours", "limit")}
    note = ", ".join(f"{side} needs {peak / 2**20:.0f} MiB beyond its buffers" for side, peak in peaks.items())
    title = f"{name}, {pair.num_bytes / 1e6:.0f} MB"
    # The limit follows from the ratio, the median over rounds. Its own median may belong to another load.
    return Result(title, rate, rate / ratio, "GB/s", ratio, aim, note)


def alternate(
    ours: Callable[[], object], limit: Callable[[], object], rounds: int = ROUNDS, shortest: float = SHORTEST_SECONDS
) -> tuple[float, float]:
    """Time both sides alternately. Returns the median of limit / ours, and the median seconds of ours. The first round
    is a warm-up; its duration determines how often a short action is repeated per timed round."""
    repeats = max(1, round(shortest / max(seconds_of(limit), seconds_of(ours))))
    # Both sides of a round see the same load of the machine.
    times = [(seconds_of(limit, repeats), seconds_of(ours, repeats)) for _ in range(rounds)]
    return statistics.median(theirs / own for theirs, own in times), statistics.median(own for _, own in times)


def peak_bytes(make: Callable[..., Pair], arguments: tuple[object, ...], side: str) -> int:
    """Measure the increase of peak resident memory during one call of a side, in a new process."""
    child = PipedChild(_measure_peak, make, arguments, side)
    try:
        return child.recv(int)
    finally:
        child.end()


def _measure_peak(pipe: Connection, make: Callable[..., Pair], arguments: tuple[object, ...], side: str) -> None:
    torch.set_num_threads(1)
    # In a process of its own: memory that the other side has freed would hide an increase.
    pipe.send(peak_increase(getattr(make(*arguments), side)))
