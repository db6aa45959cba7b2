"""Load balancing of sequences over data-parallel ranks, and packing of a rank's share into micro-batches.

The algorithms use plain Python integers: 8,192 sequences take a few milliseconds, and loading a compiled kernel would
cost each process more time than it saves in a run.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from itertools import pairwise

import numpy as np

from mcore_rl.errors import DataError

TOLERANCE = 0.002
"""Accepted relative excess of the costliest rank or bin over the mean; exchanges stop below it."""
MAX_EXCHANGES = 64
CHEAP_BINS = 8
"""Number of the cheapest bins that are candidates for an exchange."""


@dataclass(frozen=True)
class SequenceCost:
    """Cost of a sequence: `per_token` for each token, plus `per_pair` for each pair of tokens in causal attention, plus
    `per_window_pair` for each pair of tokens in a sliding window of `window` tokens.

    Only the ratio of these matters.
    """

    per_token: float = 1.0
    per_pair: float = 0.0
    per_window_pair: float = 0.0
    window: int = 0

    def of(self, lengths: np.ndarray) -> np.ndarray:
        """Return the costs of sequences. Units: tokens of equal work. Shapes: lengths integer [B] -> int64 [B]."""
        tokens = np.asarray(lengths).astype(np.float64)
        pairs = tokens * (tokens + 1) / 2
        # Each token at a distance of at least `window` from the start lacks the tokens before its window.
        hidden = np.maximum(tokens - self.window, 0)
        seen = pairs - hidden * (hidden + 1) / 2
        cost = self.per_pair / self.per_token * pairs + self.per_window_pair / self.per_token * seen
        return np.rint(tokens + cost).astype(np.int64)


TOKENS = SequenceCost()
"""Cost model in which every token costs the same."""


def balance(costs: np.ndarray, num_ranks: int) -> np.ndarray:
    """Assign every sequence to a rank so that the ranks' total costs are nearly equal.

    Longest processing time first: sequences in descending order of cost go to the rank with the lowest load, so that
    two loads differ by at most one sequence. Exchanges then reduce the difference. The number of sequences per rank may
    differ; no rank is empty if B >= num_ranks.

    Shapes: costs integer [B] -> int32 [B], values in [0, num_ranks).
    Raises: DataError for a negative cost or num_ranks < 1.
    """
    costs = _checked(costs)
    if num_ranks < 1:
        raise DataError(f"cannot balance over {num_ranks} ranks")
    ranks = np.empty(len(costs), np.int32)
    order = np.argsort(-costs, kind="stable")
    # Count an empty sequence as one token; with cost 0 all of them would go to the same rank.
    costs = np.maximum(costs, 1)
    ranks[order] = _longest_first(costs[order], num_ranks)
    _exchange(ranks, costs, num_ranks)
    return ranks


def divide_in_order(costs: np.ndarray, readers: np.ndarray, num_ranks: int) -> np.ndarray:
    """Assign every sequence to a rank such that ranks have consecutive sequences in the order of their readers.

    Each rank then has sequences of few readers: pairs of a rank and a reader are fewer than ranks and readers together.
    Each load differs from the mean by at most the longest sequence, and ranks may be empty.

    Shapes: costs integer [B], readers integer [B] -> int32 [B], values in [0, num_ranks).
    """
    ranks = np.zeros(len(costs), np.int32)
    order = np.argsort(readers, kind="stable")
    # Count an empty sequence as one token, as in `balance`.
    costs = np.maximum(np.asarray(costs, np.int64)[order], 1)
    ends = np.cumsum(costs)
    # The middle of a sequence decides. That of the last one may be rounded to its end, which is beyond the last rank.
    ranks[order] = np.minimum((ends - costs / 2) * num_ranks // ends[-1:], num_ranks - 1)
    return ranks


def pack(
    lengths: np.ndarray, capacity: int, min_bins: int = 1, *, cost: SequenceCost | None = None
) -> list[np.ndarray]:
    """Pack sequences into bins of `capacity` tokens, with the number of bins that first-fit decreasing needs.

    If min_bins is larger, the sequences are distributed evenly over min_bins bins (empty only if B < min_bins):
    pipelines need a fixed number of equal micro-batches. With `cost`, bins are always evened out by cost within the
    capacity, and the costliest bin comes first, so that ranks whose micro-batches wait for each other run their costly
    ones at the same time.

    Shapes: lengths integer [B] -> list of int64 indices per bin, ascending; together a permutation of 0..B - 1.
    Units: capacity in tokens.
    Raises: DataError for a negative length, a sequence longer than capacity, or capacity < 1.
    """
    lengths = _checked(lengths)
    if capacity < 1:
        raise DataError(f"cannot pack into bins of {capacity} tokens; raise actor.tokens_per_microbatch")
    if lengths.size and lengths.max() > capacity:
        raise DataError(
            f"a sequence has {lengths.max()} tokens, more than the {capacity} of a micro-batch; raise "
            "actor.tokens_per_microbatch"
        )
    bins = _first_fit_decreasing(lengths, capacity)
    if cost is not None or len(bins) < min_bins:
        bins = _spread(lengths, lengths if cost is None else cost.of(lengths), capacity, bins, min_bins)
    return [np.sort(np.asarray(members, np.int64)) for members in bins]


def _spread(
    lengths: np.ndarray, costs: np.ndarray, capacity: int, bins: list[np.ndarray], min_bins: int
) -> list[np.ndarray]:
    """Even out a packing, with at least min_bins bins."""
    num_bins = max(len(bins), min_bins)
    # Count empty sequences as one token, as in `balance`.
    costs = np.maximum(costs, 1)
    owners = _pack_evenly(costs, lengths, capacity, num_bins)
    if owners is None:
        # The bins are nearly full: keep the first-fit packing, which is known to fit, and halve its costliest bins.
        owners = np.empty(len(lengths), np.int64)
        for index, members in enumerate(_halve_fullest(costs, bins, num_bins)):
            owners[members] = index
    _exchange(owners, costs, num_bins, lengths, capacity)
    order = np.argsort(-np.bincount(owners, costs, num_bins), kind="stable")
    return [np.flatnonzero(owners == index) for index in order]


def _checked(lengths: np.ndarray) -> np.ndarray:
    lengths = np.asarray(lengths).astype(np.int64, copy=False)
    if lengths.ndim != 1 or (lengths.size and lengths.min() < 0):
        raise DataError(f"lengths must be a list of counts >= 0; got shape {lengths.shape}")
    return lengths


def _longest_first(weights: np.ndarray, num_ranks: int) -> list[int]:
    """Return the rank of each weight; weights must be positive and descending."""
    # A heap entry is the integer load * num_ranks + rank: integers compare fast, and ties are broken by rank.
    heap = list(range(num_ranks))
    ranks = []
    for step in (weights * num_ranks).tolist():
        entry = heap[0]
        ranks.append(entry % num_ranks)
        heapreplace(heap, entry + step)
    return ranks


def _first_fit_decreasing(lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Pack by first-fit decreasing, bin by bin: a bin repeatedly takes the longest sequence that fits.

    The packing equals the usual formulation, sequence by sequence, but each step is one search in a sorted list.
    """
    order = np.argsort(lengths, kind="stable")
    ascending = lengths[order].tolist()
    # Union-find: following free[i] leads to the longest unpacked sequence among the i shortest (0: none). Deleting
    # packed sequences from a list instead takes up to 2.5 times as long: a deletion moves all longer sequences.
    free = list(range(len(ascending) + 1))
    taken: list[int] = []
    starts: list[int] = []
    longest = len(ascending)
    while longest:
        starts.append(len(taken))
        _fill_bin(ascending, free, longest, capacity, taken)
        while free[longest] != longest:
            free[longest] = longest = free[free[longest]]
    members = order[np.asarray(taken, np.int64) - 1]
    return [members[start:end] for start, end in pairwise([*starts, len(taken)])]


def _fill_bin(ascending: list[int], free: list[int], place: int, room: int, taken: list[int]) -> None:
    """Fill one bin, starting with the sequence at `place`, which must be unpacked."""
    while place:
        taken.append(place)
        free[place] = place = place - 1
        room -= ascending[place]
        if room <= 0:
            return
        if ascending[place - 1] > room:
            place = bisect_right(ascending, room, 0, place)
        while free[place] != place:
            free[place] = place = free[free[place]]


def _pack_evenly(costs: np.ndarray, lengths: np.ndarray, capacity: int, num_bins: int) -> np.ndarray | None:
    """Assign each sequence, longest first, to the cheapest bin with room. Returns None if a sequence fits in no bin.

    A bin without room for the current sequence is set aside until sequences are short enough. Between two such events
    the bin receives a sequence, so the total time is O(B log B).
    """
    bins = np.empty(len(lengths), np.int64)
    open_bins = [(0, index) for index in range(num_bins)]  # (cost, bin)
    set_aside: list[tuple[int, int, int]] = []  # (-room, bin, cost)
    rooms = [capacity] * num_bins
    order = np.argsort(-lengths, kind="stable")
    for place, length, cost in zip(order.tolist(), lengths[order].tolist(), costs[order].tolist(), strict=True):
        while set_aside and -set_aside[0][0] >= length:
            _, index, load = heappop(set_aside)
            heappush(open_bins, (load, index))
        while open_bins and rooms[open_bins[0][1]] < length:
            load, index = heappop(open_bins)
            heappush(set_aside, (-rooms[index], index, load))
        if not open_bins:
            return None
        load, index = open_bins[0]
        heapreplace(open_bins, (load + cost, index))
        rooms[index] -= length
        bins[place] = index
    return bins


def _halve_fullest(costs: np.ndarray, bins: list[np.ndarray], num_bins: int) -> list[np.ndarray]:
    bins = list(bins)
    while len(bins) < num_bins:
        fullest = max(range(len(bins)), key=lambda index: (len(bins[index]) > 1, int(costs[bins[index]].sum())))
        members = bins[fullest]
        half = balance(costs[members], 2)
        bins[fullest] = members[half == 0]
        bins.append(members[half == 1])
    return bins


def _exchange(
    owners: np.ndarray, costs: np.ndarray, num_bins: int, lengths: np.ndarray | None = None, capacity: int = 0
) -> None:
    """Reduce the cost of the costliest bin, in place.

    While the cost decreases, swap one of its sequences with one of a cheap bin, or move it there. With `lengths`, bins
    stay within capacity.
    """
    loads = np.bincount(owners, costs, num_bins)
    sizes = np.zeros(len(costs)) if lengths is None else lengths
    rooms = capacity - np.bincount(owners, sizes, num_bins)
    enough = loads.mean() * (1 + TOLERANCE)
    for _ in range(MAX_EXCHANGES):
        most = int(loads.argmax())
        if loads[most] <= enough:
            return
        mine = np.flatnonzero(owners == most)
        cheap = np.argsort(loads, kind="stable")[:CHEAP_BINS]
        cheap = cheap[cheap != most]
        theirs = np.flatnonzero(np.isin(owners, cheap))
        # Candidates: a sequence in a cheap bin (swap), or an empty slot of a cheap bin (move).
        where = np.concatenate([owners[theirs], cheap])
        cost = costs[mine, None] - np.concatenate([costs[theirs], np.zeros(len(cheap))])
        size = sizes[mine, None] - np.concatenate([sizes[theirs], np.zeros(len(cheap))])
        # Larger of the two loads after each candidate exchange; inf if a bin would exceed its capacity.
        after = np.maximum(loads[most] - cost, loads[where] + cost)
        after[(size > rooms[where]) | (-size > rooms[most])] = np.inf
        i, j = divmod(int(after.argmin()), len(where)) if after.size else (0, 0)
        if not after.size or after[i, j] >= loads[most]:
            return
        owners[mine[i]] = where[j]
        if j < len(theirs):
            owners[theirs[j]] = most
        loads[[most, where[j]]] += [-cost[i, j], cost[i, j]]
        rooms[[most, where[j]]] += [size[i, j], -size[i, j]]
