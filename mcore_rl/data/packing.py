"""Who computes what: spreads sequences over data-parallel ranks, and packs a rank's share into micro-batches.

Plain Python integers and standard algorithms, on purpose: 8,192 sequences take a few milliseconds, and a
compiled kernel would cost every process more at its start than it saves in a run.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from itertools import pairwise

import numpy as np

from mcore_rl.errors import DataError

TOLERANCE = 0.002
"""Of the costliest rank or bin above the mean: what is left is not worth another exchange."""
MAX_EXCHANGES = 64
CHEAP_BINS = 8
"""With how many of the cheapest an exchange is tried."""


@dataclass(frozen=True)
class SequenceCost:
    """Work that sequences take: `per_token` for each token, `per_pair` for each pair of tokens that causal attention
    joins. Only the ratio of the two counts."""

    per_token: float = 1.0
    per_pair: float = 0.0

    def of(self, lengths: np.ndarray) -> np.ndarray:
        """Shapes: lengths integer [B]; returns int64 [B]. Units: tokens, the pairs converted to as much work."""
        tokens = np.asarray(lengths).astype(np.float64)
        pairs = tokens * (tokens + 1) / 2
        return np.rint(tokens + self.per_pair / self.per_token * pairs).astype(np.int64)


TOKENS = SequenceCost()
"""Every token costs the same, wherever it stands."""


def balance(costs: np.ndarray, num_ranks: int) -> np.ndarray:
    """Assigns every sequence to a rank so that the ranks' costs are nearly equal; costs may be token counts.

    Longest processing time first: each sequence, costliest first, goes to the rank with the least, so two ranks never
    differ by more than one sequence; where few sequences leave a difference, exchanges lower it. Numbers of sequences
    may differ; no rank is empty when B >= num_ranks.

    Shapes: costs integer [B]; returns int32 [B] with values in 0..num_ranks - 1.
    Raises: DataError for a negative cost or num_ranks < 1.
    """
    costs = _checked(costs)
    if num_ranks < 1:
        raise DataError(f"cannot balance over {num_ranks} ranks")
    ranks = np.empty(len(costs), np.int32)
    order = np.argsort(-costs, kind="stable")
    # An empty sequence counts as one token: otherwise ties would pile all of them on one rank.
    costs = np.maximum(costs, 1)
    ranks[order] = _longest_first(costs[order], num_ranks)
    _exchange(ranks, costs, num_ranks)
    return ranks


def pack(
    lengths: np.ndarray, capacity: int, min_bins: int = 1, *, cost: SequenceCost | None = None
) -> list[np.ndarray]:
    """Packs sequences into as few bins of `capacity` tokens as first-fit decreasing finds.

    With min_bins above the number needed, the sequences are spread evenly over min_bins bins (bins stay empty only
    where B < min_bins): pipelines want a set number of micro-batches, and equal ones. With `cost` they are spread in
    any case, evenly by cost as far as the capacity lets them, and the costliest bin comes first: ranks whose
    micro-batches wait for each other then run their costly ones together.

    Shapes: lengths integer [B]; returns bins of int64 indices, together 0..B - 1 exactly once, each ascending.
    Units: capacity in tokens.
    Raises: DataError for a negative length, a sequence longer than capacity, or capacity < 1.
    """
    lengths = _checked(lengths)
    if capacity < 1:
        raise DataError(f"cannot pack into bins of {capacity} tokens; raise actor.tokens_per_microbatch")
    if lengths.size and lengths.max() > capacity:
        raise DataError(
            f"a sequence takes {lengths.max()} tokens, more than the {capacity} of a micro-batch; raise "
            "actor.tokens_per_microbatch"
        )
    bins = _first_fit_decreasing(lengths, capacity)
    if cost is not None or len(bins) < min_bins:
        bins = _spread(lengths, lengths if cost is None else cost.of(lengths), capacity, bins, min_bins)
    return [np.sort(np.asarray(members, np.int64)) for members in bins]


def _spread(
    lengths: np.ndarray, costs: np.ndarray, capacity: int, bins: list[np.ndarray], min_bins: int
) -> list[np.ndarray]:
    """Even bins, at least min_bins of them, from a packing that need not be even."""
    num_bins = max(len(bins), min_bins)
    # As in balance: ties of empty sequences would pile up.
    costs = np.maximum(costs, 1)
    owners = _pack_evenly(costs, lengths, capacity, num_bins)
    if owners is None:
        # Nearly full bins leave no choice of their own: then that of the packing, and its costliest bins in halves.
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
    """Rank of each weight; weights must be positive and descending."""
    # load * num_ranks + rank in one integer: comparing integers is what makes the heap fast, and breaks ties by rank.
    heap = list(range(num_ranks))
    ranks = []
    for step in (weights * num_ranks).tolist():
        entry = heap[0]
        ranks.append(entry % num_ranks)
        heapreplace(heap, entry + step)
    return ranks


def _first_fit_decreasing(lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """First-fit decreasing, one bin after the other: a bin takes the longest sequence that still fits until none does.

    That is the same packing as walking the sequences and opening bins, but each step is one search in a sorted list.
    """
    order = np.argsort(lengths, kind="stable")
    ascending = lengths[order].tolist()
    # free[i] leads to the longest untaken sequence among the i shortest (0: none).
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
    """Takes untaken sequences into one bin, starting with the one at `place`, which must be untaken."""
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
    """Bin of each sequence: longest first, each into the bin of least cost that has room; None where none has.

    A bin without room for one sequence is set aside until the sequences are as short as its room. Every time that this
    happens it has received one in between, so all of it takes O(B log B).
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
    """Lowers the cost of the costliest bin, in place: while it helps, one of its sequences changes places with one of
    a cheap bin, or moves there. With `lengths`, bins stay within capacity.
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
        # What a sequence may change places with: one of theirs, or nothing in one of their bins.
        where = np.concatenate([owners[theirs], cheap])
        cost = costs[mine, None] - np.concatenate([costs[theirs], np.zeros(len(cheap))])
        size = sizes[mine, None] - np.concatenate([sizes[theirs], np.zeros(len(cheap))])
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
