"""Who computes what: spreads sequences over data-parallel ranks, and packs a rank's share into micro-batches.

Plain Python integers and two standard algorithms, on purpose: 8,192 sequences take a few milliseconds, and a
compiled kernel would cost every process more at its start than it saves in a run.
"""

from __future__ import annotations

from bisect import bisect_right
from heapq import heapreplace
from itertools import pairwise

import numpy as np

from mcore_rl.errors import DataError


def balance(lengths: np.ndarray, num_ranks: int) -> np.ndarray:
    """Assigns every sequence to a rank so that the ranks' token counts are nearly equal.

    Longest processing time first: each sequence, longest first, goes to the rank with the fewest tokens, so two
    ranks never differ by more than one sequence. Counts of sequences may differ; no rank is empty when B >= num_ranks.

    Shapes: lengths integer [B]; returns int32 [B] with values in 0..num_ranks - 1.
    Raises: DataError for a negative length or num_ranks < 1.
    """
    lengths = _checked(lengths)
    if num_ranks < 1:
        raise DataError(f"cannot balance over {num_ranks} ranks")
    ranks = np.empty(len(lengths), np.int32)
    order = np.argsort(-lengths, kind="stable")
    # An empty sequence counts as one token: otherwise ties would pile all of them on one rank.
    weights = np.maximum(lengths[order], 1)
    ranks[order] = _longest_first(weights, num_ranks)
    return ranks


def pack(lengths: np.ndarray, capacity: int, min_bins: int = 1) -> list[np.ndarray]:
    """Packs sequences into as few bins of `capacity` tokens as first-fit decreasing finds.

    With min_bins above the number needed, the sequences are spread evenly over min_bins bins (bins stay empty only
    where B < min_bins): pipelines want a set number of micro-batches, and equal ones.

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
    if len(bins) < min_bins:
        bins = _spread(lengths, capacity, bins, min_bins)
    return [np.sort(np.asarray(members, np.int64)) for members in bins]


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


def _spread(lengths: np.ndarray, capacity: int, bins: list[np.ndarray], num_bins: int) -> list[np.ndarray]:
    """Even bins, num_bins of them, from a packing with fewer."""
    ranks = balance(lengths, num_bins)
    even = [np.flatnonzero(ranks == rank) for rank in range(num_bins)]
    if all(lengths[members].sum() <= capacity for members in even):
        return even
    # Few and long sequences can be even only above capacity: then halve the fullest bins of the packing instead.
    return _halve_fullest(lengths, bins, num_bins)


def _halve_fullest(lengths: np.ndarray, bins: list[np.ndarray], num_bins: int) -> list[np.ndarray]:
    bins = list(bins)
    while len(bins) < num_bins:
        fullest = max(range(len(bins)), key=lambda index: (len(bins[index]) > 1, int(lengths[bins[index]].sum())))
        members = bins[fullest]
        half = balance(lengths[members], 2)
        bins[fullest] = members[half == 0]
        bins.append(members[half == 1])
    return bins
