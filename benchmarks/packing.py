"""Balance and pack 8,192 sequences with lognormal lengths, beside the usual alternatives.

    python -m benchmarks packing

Balance against the largest differencing method (Karmarkar-Karp) over 64 ranks, packing against next-fit; limits: both
of ours together in 10 ms, fill at least 0.99. The first call counts too, for nothing here is compiled.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.result import Result
from mcore_rl.data.packing import balance, pack

NUM_SEQUENCES = 8192
NUM_RANKS = 64
CAPACITY = 16384
REPEATS = 9
LIMIT_MS = 10.0
LIMIT_FILL = 0.99


def run() -> list[Result]:
    return [result for sigma in (0.5, 1.0, 1.5) for result in _measure(sigma)]


def _measure(sigma: float) -> list[Result]:
    lengths = _lognormal(sigma)
    first_ms, _ = _time(_both, 1, lengths)
    balance_ms, ranks = _time(balance, REPEATS, lengths, NUM_RANKS)
    pack_ms, bins = _time(pack, REPEATS, lengths, CAPACITY)
    kk_ms, kk_ranks = _time(largest_differencing, 1, lengths, NUM_RANKS)
    next_fit_ms, next_fit_bins = _time(next_fit, REPEATS, lengths, CAPACITY)
    spread = f"sigma {sigma}: "
    return [
        _row(spread + "balance + pack", balance_ms + pack_ms, LIMIT_MS, "ms", "<= 1"),
        _row(spread + "the same, first call", first_ms, LIMIT_MS, "ms"),
        _row(spread + "fill", _fill(lengths, bins), LIMIT_FILL, "", ">= 1"),
        _row(spread + "fill, beside next-fit", _fill(lengths, bins), _fill(lengths, next_fit_bins), ""),
        _row(spread + "pack, beside next-fit", pack_ms, next_fit_ms, "ms"),
        _row(spread + "balance, beside Karmarkar-Karp", balance_ms, kk_ms, "ms"),
        _row(spread + "fullest / mean rank, same", _imbalance(lengths, ranks), _imbalance(lengths, kk_ranks), ""),
    ]


def largest_differencing(lengths: np.ndarray, num_ranks: int) -> np.ndarray:
    """Multi-way Karmarkar-Karp: repeatedly joins the two partial partitions with the largest spread, largest part of
    one with the smallest of the other."""
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for index, length in enumerate(lengths.tolist()):
        heap.append((-length, index, [(length, [index])] + [(0, [])] * (num_ranks - 1)))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, order, left = heapq.heappop(heap)
        _, _, right = heapq.heappop(heap)
        parts = [(a + b, x + y) for (a, x), (b, y) in zip(left, reversed(right), strict=True)]
        parts.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (parts[-1][0] - parts[0][0], order, parts))
    ranks = np.empty(len(lengths), np.int32)
    for rank, (_, members) in enumerate(heap[0][2]):
        ranks[members] = rank
    return ranks


def next_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Sequences in their order; a new bin whenever the next one does not fit."""
    bins: list[list[int]] = [[]]
    room = capacity
    for index, length in enumerate(lengths.tolist()):
        if length > room:
            bins.append([])
            room = capacity
        bins[-1].append(index)
        room -= length
    return bins


def _lognormal(sigma: float) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.clip(rng.lognormal(6.0, sigma, NUM_SEQUENCES), 1, CAPACITY // 2).astype(np.int32)


def _both(lengths: np.ndarray) -> None:
    balance(lengths, NUM_RANKS)
    pack(lengths, CAPACITY)


def _time(call: Callable[..., Any], repeats: int, *arguments: Any) -> tuple[float, Any]:
    """(median milliseconds, last result)"""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = call(*arguments)
        times.append((time.perf_counter() - start) * 1e3)
    return float(np.median(times)), result


def _imbalance(lengths: np.ndarray, ranks: np.ndarray) -> float:
    loads = np.bincount(ranks, lengths, NUM_RANKS)
    return float(loads.max() / loads.mean())


def _fill(lengths: np.ndarray, bins: list[Any]) -> float:
    return float(lengths.sum() / (len(bins) * CAPACITY))


def _row(name: str, ours: float, limit: float, unit: str, aim: str = "") -> Result:
    return Result(name, ours, limit, unit, ours / limit, aim)
