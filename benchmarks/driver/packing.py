"""Balancing and packing of 8,192 sequences with lognormal lengths, compared with common alternatives.

    python -m benchmarks packing

Balancing over 64 ranks is compared with the largest differencing method (Karmarkar-Karp), packing with next-fit.
Limits: 10 ms for both together, and a fill of at least 0.99. The first call has a row of its own; nothing is compiled.

The second half uses a cost per sequence in which attention over the longest sequence is as expensive as all its other
work. For 512 long-tailed responses, the cost of the most expensive rank is compared with Karmarkar-Karp by tokens and
by cost. Limit: 1.02 times the mean, or the most expensive response if that is more. For the share of one rank, the most
expensive micro-batch is compared with packing by tokens.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from benchmarks.result import Result, compare
from benchmarks.sizes import size
from mcore_rl.data.packing import SequenceCost, balance, pack

T = TypeVar("T")
NUM_SEQUENCES = size(8192, 256)
NUM_RANKS = size(64, 4)
CAPACITY = 16384
"""Tokens per packed row."""
REPEATS = size(9, 1)
LIMIT_MS = 10.0
LIMIT_FILL = 0.99
"""Limit for the tokens in rows, relative to the capacity of the rows."""
NUM_RESPONSES = size(512, 32)
LONGEST = 20480
BUDGET = 2 * LONGEST
COST = SequenceCost(per_token=1.0, per_pair=2 / LONGEST)
LIMIT_IMBALANCE = 1.02
"""Limit for the cost of the most expensive rank, relative to a lower bound."""


def run() -> list[Result]:
    by_tokens = [result for sigma in (0.5, 1.0, 1.5) for result in _measure(sigma)]
    return by_tokens + [result for sigma in (0.5, 1.0, 1.5) for result in _measure_cost(sigma)]


def _measure(sigma: float) -> list[Result]:
    lengths = _lognormal(sigma)
    # Before all others, which would warm up its caches.
    first_ms, _ = _time(_both, 1, lengths)
    balance_ms, ranks = _time(balance, REPEATS, lengths, NUM_RANKS)
    pack_ms, bins = _time(pack, REPEATS, lengths, CAPACITY)
    kk_ms, kk_ranks = _time(largest_differencing, 1, lengths, NUM_RANKS)
    next_fit_ms, next_fit_bins = _time(next_fit, REPEATS, lengths, CAPACITY)
    spread = f"sigma {sigma}: "
    return [
        compare(spread + "balance + pack", balance_ms + pack_ms, LIMIT_MS, "ms", "<= 1"),
        compare(spread + "the same, first call", first_ms, LIMIT_MS, "ms"),
        compare(spread + "fill", _fill(lengths, bins), LIMIT_FILL, "", ">= 1"),
        compare(spread + "fill, beside next-fit", _fill(lengths, bins), _fill(lengths, next_fit_bins), ""),
        compare(spread + "pack, beside next-fit", pack_ms, next_fit_ms, "ms"),
        compare(spread + "balance, beside Karmarkar-Karp", balance_ms, kk_ms, "ms"),
        compare(spread + "fullest / mean rank, same", _imbalance(lengths, ranks), _imbalance(lengths, kk_ranks), ""),
    ]


def _measure_cost(sigma: float) -> list[Result]:
    """Measure balancing of a whole step and packing of one rank's share."""
    lengths = np.clip(_lognormal(sigma).astype(np.int64) * 4, 1, LONGEST)
    few, costs = COST.of(lengths[:NUM_RESPONSES]), COST.of(lengths)
    balance_ms, ranks = _time(balance, REPEATS, costs, NUM_RANKS)
    share = lengths[ranks == 0]
    # One row more than necessary leaves room to balance costs.
    needed = len(pack(share, BUDGET))
    pack_ms, bins = _time(_pack_by_cost, REPEATS, share, needed + 1)
    ours = _above_bound(few, balance(few, NUM_RANKS))
    peer = _above_bound(few, largest_differencing(few, NUM_RANKS))
    by_tokens = _above_bound(few, largest_differencing(lengths[:NUM_RESPONSES], NUM_RANKS))
    ours_micro, by_tokens_micro = (_costliest(share, each) for each in (bins, pack(share, BUDGET, needed + 1)))
    spread = f"attention cost, sigma {sigma}: "
    return [
        compare(spread + "balance 8,192 + pack a rank's share", balance_ms + pack_ms, LIMIT_MS, "ms", "<= 1"),
        compare(spread + "costliest rank of 512 responses", ours, LIMIT_IMBALANCE, "", "<= 1"),
        compare(spread + "the same, beside Karmarkar-Karp", ours, peer, ""),
        compare(spread + "the same, beside Karmarkar-Karp by tokens", ours, by_tokens, ""),
        compare(spread + "costliest micro-batch, beside by tokens", ours_micro, by_tokens_micro, ""),
    ]


def _pack_by_cost(lengths: np.ndarray, min_bins: int) -> list[np.ndarray]:
    return pack(lengths, BUDGET, min_bins, cost=COST)


def _above_bound(costs: np.ndarray, ranks: np.ndarray) -> float:
    loads = np.bincount(ranks, costs, NUM_RANKS)
    # No division can be better than the mean, or than a single response that costs more.
    return float(loads.max() / max(loads.mean(), costs.max()))


def _costliest(lengths: np.ndarray, bins: list[np.ndarray]) -> float:
    """Return the maximum cost of a microbatch relative to the mean."""
    loads = [COST.of(lengths[members]).sum() for members in bins]
    return float(max(loads) / np.mean(loads))


def largest_differencing(lengths: np.ndarray, num_ranks: int) -> np.ndarray:
    """Partition by multi-way Karmarkar-Karp.

    Repeatedly joins the two partial partitions with the largest spread, largest part of one with smallest of the other.
    """
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for index, length in enumerate(lengths.tolist()):
        # The index breaks ties, so that lists are never compared.
        heap.append((-length, index, [(length, [index])] + [(0, [])] * (num_ranks - 1)))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, order, left = heapq.heappop(heap)
        _, _, right = heapq.heappop(heap)
        # Largest with smallest, so that the sums differ as little as possible.
        parts = [(a + b, x + y) for (a, x), (b, y) in zip(left, reversed(right), strict=True)]
        parts.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (parts[-1][0] - parts[0][0], order, parts))
    ranks = np.empty(len(lengths), np.int32)
    for rank, (_, members) in enumerate(heap[0][2]):
        ranks[members] = rank
    return ranks


def next_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Pack sequences in order; open a new bin when the next sequence does not fit."""
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


def _time(call: Callable[..., T], repeats: int, *arguments: object) -> tuple[float, T]:
    """Return (median milliseconds, last result)."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = call(*arguments)
        times.append((time.perf_counter() - start) * 1e3)
    return float(np.median(times)), result


def _imbalance(lengths: np.ndarray, ranks: np.ndarray) -> float:
    loads = np.bincount(ranks, lengths, NUM_RANKS)
    return float(loads.max() / loads.mean())


def _fill(lengths: np.ndarray, bins: Sequence[object]) -> float:
    return float(lengths.sum() / (len(bins) * CAPACITY))
