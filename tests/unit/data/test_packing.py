import itertools

import numpy as np
import pytest

from mcore_rl.data.packing import balance, pack
from mcore_rl.errors import DataError


def lognormal(count: int, seed: int = 0, sigma: float = 1.0) -> np.ndarray:
    return np.clip(np.random.default_rng(seed).lognormal(6, sigma, count), 1, 4096).astype(np.int32)


def first_fit_decreasing(lengths, capacity):
    """The textbook walk: longest first, into the first bin with room."""
    bins: list[list[int]] = []
    for length in sorted(lengths.tolist(), reverse=True):
        for members in bins:
            if sum(members) + length <= capacity:
                members.append(length)
                break
        else:
            bins.append([length])
    return sorted(sorted(members) for members in bins)


def fewest_bins(lengths, capacity):
    """Brute force over all assignments."""

    def fits(count):
        assignments = itertools.product(range(count), repeat=len(lengths))
        return any(np.bincount(bins, lengths, count).max() <= capacity for bins in assignments)

    return next(count for count in itertools.count(1) if fits(count))


@pytest.mark.parametrize("seed", range(8))
def test_packs_as_textbook_first_fit_decreasing(seed):
    lengths = np.random.default_rng(seed).integers(0, 101, 300)  # some fill a bin, some are empty, many equal
    bins = pack(lengths, 100)
    # Empty sequences fit everywhere; where they go is free.
    ours = sorted(sorted(length for length in lengths[members].tolist() if length) for members in bins)
    expected = first_fit_decreasing(lengths[lengths > 0], 100)
    assert [members for members in ours if members] == expected


@pytest.mark.parametrize("min_bins", [1, 7, 40, 333, 900])
def test_every_sequence_is_in_exactly_one_bin_within_capacity(min_bins):
    lengths = lognormal(700)
    bins = pack(lengths, 5000, min_bins)
    assert np.array_equal(np.sort(np.concatenate(bins)), np.arange(700))
    assert max(lengths[members].sum() for members in bins) <= 5000
    assert all(members.dtype == np.int64 for members in bins)
    assert len(bins) >= min_bins
    assert sum(len(members) == 0 for members in bins) == max(0, min_bins - 700)


@pytest.mark.parametrize("seed", range(6))
def test_uses_few_more_bins_than_the_optimum(seed):
    lengths = np.random.default_rng(seed).integers(1, 100, 6)
    assert len(pack(lengths, 100)) <= 11 / 9 * fewest_bins(lengths, 100) + 6 / 9


@pytest.mark.parametrize("sigma", [0.5, 1.0, 1.5])
def test_long_tailed_lengths_fill_the_bins(sigma):
    lengths = lognormal(8192, sigma=sigma)
    assert lengths.sum() / (len(pack(lengths, 16384)) * 16384) >= 0.99


def test_min_bins_are_even():
    lengths = lognormal(400)
    loads = [lengths[members].sum() for members in pack(lengths, 10**6, 8)]
    assert len(loads) == 8
    assert max(loads) - min(loads) <= lengths.max()


def test_min_bins_never_break_the_capacity():
    # Longest first puts 3 + 3 | 2 + 2 and then 2 on one of them: 7 > 6, although two bins of 6 suffice.
    bins = pack(np.array([3, 3, 2, 2, 2]), 6, 2)
    assert sorted(len(members) for members in bins) == [2, 3]
    lengths = np.array([6, 6, 4, 4, 4, 3, 3, 2, 2, 2] * 5)
    for min_bins in range(1, 50):
        packed = pack(lengths, 12, min_bins)
        assert max(lengths[members].sum() for members in packed) <= 12
        assert np.array_equal(np.sort(np.concatenate(packed)), np.arange(50))


def test_a_sequence_above_capacity_is_refused_with_its_length_and_the_key() -> None:
    assert len(pack(np.array([3, 10, 1]), 10)) == 2
    with pytest.raises(DataError, match=r"takes 11 tokens, more than the 10 .*raise actor\.tokens_per_microbatch"):
        pack(np.array([3, 11, 1]), 10)


def test_packing_is_deterministic_and_ignores_the_dtype():
    lengths = lognormal(1000)
    again = pack(lengths.astype(np.int64), 8192)
    assert all(np.array_equal(a, b) for a, b in zip(pack(lengths, 8192), again, strict=True))


def test_no_sequences_give_only_the_bins_asked_for():
    assert [members.tolist() for members in pack(np.empty(0, np.int32), 10, 3)] == [[], [], []]


def test_int32_lengths_do_not_overflow():
    lengths = np.full(64, 2**30, np.int32)
    assert np.bincount(balance(lengths, 8)).tolist() == [8] * 8


def naive_longest_first(lengths, num_ranks):
    loads = [0] * num_ranks
    for length in sorted(lengths.tolist(), reverse=True):
        loads[loads.index(min(loads))] += length
    return sorted(loads)


@pytest.mark.parametrize("num_ranks", [1, 3, 64])
def test_balance_is_longest_processing_time_first(num_ranks):
    lengths = lognormal(1000)
    ranks = balance(lengths, num_ranks)
    assert ranks.dtype == np.int32
    assert sorted(np.bincount(ranks, lengths, num_ranks).astype(int).tolist()) == naive_longest_first(
        lengths, num_ranks
    )


@pytest.mark.parametrize("lengths", [np.zeros(9, int), np.array([100] + [0] * 8), np.arange(9)])
def test_no_rank_is_empty_when_there_are_enough_sequences(lengths):
    assert np.bincount(balance(lengths, 8), minlength=8).min() >= 1


def test_nonsense_is_refused():
    with pytest.raises(DataError, match="0 ranks"):
        balance(np.array([1]), 0)
    with pytest.raises(DataError, match=r"actor\.tokens_per_microbatch"):
        pack(np.array([1]), 0)
    with pytest.raises(DataError, match=">= 0"):
        pack(np.array([-1]), 4)
