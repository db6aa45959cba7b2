import numpy as np
import pytest

from mcore_rl.data.packing import SequenceCost, balance, divide_in_order, pack
from mcore_rl.errors import DataError


def long_tailed(count: int, sigma: float = 1.0, seed: int = 0) -> np.ndarray:
    return np.clip(np.random.default_rng(seed).lognormal(7.5, sigma, count), 1, 20480).astype(np.int32)


def first_fit_decreasing(lengths, capacity):
    """Pack by the textbook algorithm: longest first, into the first bin with room."""
    bins: list[list[int]] = []
    for length in sorted(lengths.tolist(), reverse=True):
        for members in bins:
            if sum(members) + length <= capacity:
                members.append(length)
                break
        else:
            bins.append([length])
    return sorted(sorted(members) for members in bins)


@pytest.mark.parametrize("seed", range(8))
def test_pack_equals_textbook_first_fit_decreasing(seed):
    lengths = np.random.default_rng(seed).integers(0, 101, 300)  # some fill a bin, some are empty, many equal
    bins = pack(lengths, 100)
    # Empty sequences fit into any bin, so their bins are not compared.
    ours = sorted(sorted(length for length in lengths[members].tolist() if length) for members in bins)
    expected = first_fit_decreasing(lengths[lengths > 0], 100)
    assert [members for members in ours if members] == expected


@pytest.mark.parametrize("min_bins", [1, 7, 40, 333, 900])
def test_pack_assigns_each_sequence_once_within_capacity(min_bins):
    lengths = long_tailed(700)
    bins = pack(lengths, 25_000, min_bins)
    assert np.array_equal(np.sort(np.concatenate(bins)), np.arange(700))
    assert max(lengths[members].sum() for members in bins) <= 25_000
    assert all(members.dtype == np.int64 for members in bins)
    assert len(bins) >= min_bins
    assert sum(len(members) == 0 for members in bins) == max(0, min_bins - 700)


def test_pack_min_bins_are_even():
    lengths = long_tailed(400)
    loads = [lengths[members].sum() for members in pack(lengths, 10**6, 8)]
    assert len(loads) == 8
    assert max(loads) - min(loads) <= lengths.max()


def test_pack_min_bins_respect_capacity():
    # Filling the emptiest bin gives 3 + 2 | 3 + 2, and the last 2 exceeds the capacity; 3 + 3 | 2 + 2 + 2 fits.
    bins = pack(np.array([3, 3, 2, 2, 2]), 6, 2)
    assert sorted(len(members) for members in bins) == [2, 3]
    lengths = np.array([6, 6, 4, 4, 4, 3, 3, 2, 2, 2] * 5)
    for min_bins in range(1, 50):
        packed = pack(lengths, 12, min_bins)
        assert max(lengths[members].sum() for members in packed) <= 12
        assert np.array_equal(np.sort(np.concatenate(packed)), np.arange(50))


def test_pack_sequence_above_capacity_is_rejected() -> None:
    assert len(pack(np.array([3, 10, 1]), 10)) == 2
    with pytest.raises(DataError, match=r"has 11 tokens, more than the 10 .*raise actor\.tokens_per_microbatch"):
        pack(np.array([3, 11, 1]), 10)


def test_pack_is_deterministic_and_ignores_dtype():
    lengths = long_tailed(1000)
    for cost in (None, SequenceCost(per_token=1.0, per_pair=1e-4)):
        first, again = (pack(given, 40_000, 150, cost=cost) for given in (lengths, lengths.astype(np.int64)))
        assert [members.tolist() for members in first] == [members.tolist() for members in again]


def test_pack_without_sequences_returns_min_bins():
    assert [members.tolist() for members in pack(np.empty(0, np.int32), 10, 3)] == [[], [], []]


def test_balance_int32_lengths_do_not_overflow():
    lengths = np.full(256, 2**30, np.int32)  # more than exchanges could even out
    assert np.bincount(balance(lengths, 8)).tolist() == [32] * 8


def naive_longest_first(lengths, num_ranks):
    loads = [0] * num_ranks
    for length in sorted(lengths.tolist(), reverse=True):
        loads[loads.index(min(loads))] += length
    return sorted(loads)


@pytest.mark.parametrize("num_ranks", [1, 3, 64])
def test_balance_is_at_least_as_good_as_longest_first(num_ranks):
    lengths = long_tailed(1000)
    ranks = balance(lengths, num_ranks)
    assert ranks.dtype == np.int32
    assert np.bincount(ranks, lengths, num_ranks).max() <= max(naive_longest_first(lengths, num_ranks))


ATTENTION = SequenceCost(per_token=1.0, per_pair=1e-4)  # at 20,000 tokens attention is half of the cost


def test_sequence_cost_counts_causal_pairs():
    lengths = np.array([0, 1, 2, 300])
    pairs = [sum(range(1, length + 1)) for length in lengths]
    assert SequenceCost(per_token=4.0, per_pair=2.0).of(lengths).tolist() == [
        round(n + p / 2) for n, p in zip(lengths, pairs, strict=True)
    ]


def test_sequence_cost_counts_pairs_in_windows():
    lengths = np.array([0, 1, 3, 4, 50])
    visible = [sum(min(place, 3) for place in range(1, length + 1)) for length in lengths]
    assert SequenceCost(per_token=4.0, per_window_pair=2.0, window=3).of(lengths).tolist() == [
        round(n + p / 2) for n, p in zip(lengths, visible, strict=True)
    ]


@pytest.mark.parametrize("sigma", [0.5, 1.0, 1.5])
def test_balance_long_tailed_responses_over_many_ranks(sigma):
    for seed in range(4):
        costs = ATTENTION.of(long_tailed(512, sigma, seed))
        loads = np.bincount(balance(costs, 64), costs, 64)
        # Lower bound: the mean load, and the costliest response.
        assert loads.max() <= 1.02 * max(loads.mean(), costs.max())


def test_balance_few_sequences_reach_optimum():
    # Longest first gives a load of 7 + 4 + 4 = 15; 7 + 6 | 5 + 4 + 4 is even.
    costs = np.array([7, 6, 5, 4, 4])
    assert np.bincount(balance(costs, 2), costs).tolist() == [13, 13]


def fullest(costs, bins):
    loads = np.array([costs[members].sum() for members in bins])
    return loads.max() / max(loads.mean(), costs.max())


@pytest.mark.parametrize("sigma", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("extra", [0, 1, 3])
def test_pack_with_cost_evens_bins_within_capacity(sigma, extra):
    lengths, capacity = long_tailed(128, sigma, 7), 2 * 20480
    needed = len(pack(lengths, capacity))
    bins = pack(lengths, capacity, needed + extra, cost=ATTENTION)
    assert len(bins) == needed + extra
    assert np.array_equal(np.sort(np.concatenate(bins)), np.arange(128))
    assert max(lengths[members].sum() for members in bins) <= capacity
    costs = ATTENTION.of(lengths)
    # With the minimum number of bins, all bins are nearly full and few assignments fit.
    assert fullest(costs, bins) <= (1.03 if extra else 1.1)
    assert fullest(costs, bins) < fullest(costs, pack(lengths, capacity, needed + extra))
    loads = [costs[members].sum() for members in bins]
    assert loads == sorted(loads, reverse=True)


def test_pack_with_cost_full_bins_respect_capacity():
    # By cost alone the two long sequences would be alone, and the short ones together exceed one bin.
    lengths = np.array([60, 60, *[10] * 8])
    bins = pack(lengths, 100, cost=SequenceCost(1.0, 1.0))
    assert sorted(lengths[members].sum() for members in bins) == [100, 100]


@pytest.mark.parametrize("lengths", [np.zeros(9, int), np.array([100] + [0] * 8), np.arange(9)])
def test_balance_enough_sequences_leave_no_rank_empty(lengths):
    assert np.bincount(balance(lengths, 8), minlength=8).min() >= 1


def test_packing_invalid_arguments_are_rejected():
    with pytest.raises(DataError, match="0 ranks"):
        balance(np.array([1]), 0)
    with pytest.raises(DataError, match=r"actor\.tokens_per_microbatch"):
        pack(np.array([1]), 0)
    with pytest.raises(DataError, match=">= 0"):
        pack(np.array([-1]), 4)


@pytest.mark.parametrize(("num_readers", "num_ranks"), [(1, 1), (64, 1), (1, 7), (64, 16), (5, 64)])
def test_divide_in_order_gives_each_rank_few_readers(num_readers, num_ranks):
    costs, random = long_tailed(700), np.random.default_rng(1)
    readers = random.integers(0, num_readers, 700)
    ranks = divide_in_order(costs, readers, num_ranks)
    loads = np.bincount(ranks, costs, num_ranks)
    assert np.abs(loads - costs.sum() / num_ranks).max() <= costs.max()
    pairs = set(zip(ranks.tolist(), readers.tolist(), strict=True))
    assert len(pairs) < num_readers + num_ranks
    assert ranks.dtype == np.int32


def test_divide_in_order_of_empty_sequences_uses_all_ranks():
    assert divide_in_order(np.zeros(4, np.int32), np.zeros(4, np.int32), 2).tolist() == [0, 0, 1, 1]
    assert divide_in_order(np.empty(0, np.int32), np.empty(0, np.int32), 2).tolist() == []


def test_divide_in_order_after_rounding_has_no_rank_too_many():
    """A float64 does not distinguish the middle of the last sequence from its end."""
    ranks = divide_in_order(np.array([2**60, 1]), np.zeros(2, np.int32), 2)
    assert ranks.max() == 1
