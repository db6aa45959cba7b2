"""Whitening of a batch in parts, compared with numpy on the whole batch."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.algorithms import compute_advantages, estimator
from mcore_rl.algorithms.interface import AdvantageInputs
from mcore_rl.algorithms.whitening import Moments, whiten


def check(moments, chosen):
    assert moments.count == len(chosen)
    assert moments.mean == pytest.approx(chosen.mean() if len(chosen) else 0.0, rel=1e-12, abs=1e-12)
    assert moments.variance == pytest.approx(chosen.var(ddof=1) if len(chosen) > 1 else 0.0, rel=1e-9, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 12), st.integers(0, 6), st.integers(1, 5), st.sampled_from([0.0, 50.0]))
def test_moments_of_parts_sum_to_moments_of_whole(seed, size, length, parts, offset):
    rng = np.random.default_rng(seed)
    values, mask = rng.normal(size=(size, length)) + offset, rng.random((size, length)) < 0.6
    values[~mask] = np.nan
    whole = values[mask]
    pieces = [
        Moments.of(torch.tensor(v), torch.tensor(m))
        for v, m in zip(np.array_split(values, parts), np.array_split(mask, parts), strict=True)
    ]
    check(sum(pieces, Moments()), whole)
    check(Moments.merged(torch.stack([piece.as_tensor() for piece in pieces])), whole)
    check(Moments.of(torch.tensor(values), torch.tensor(mask)), whole)


def test_moments_keep_variance_much_smaller_than_mean():
    """A float64 sum of squares would have an error of 1e16 * 1e-16 per term, as large as the variance."""
    values = 1e8 + np.random.default_rng(0).normal(size=(4, 1000))
    halves = [Moments.of(torch.tensor(part), torch.ones(2, 1000)) for part in (values[:2], values[2:])]
    assert (halves[0] + halves[1]).variance == pytest.approx(values.var(ddof=1), rel=1e-6)


def test_moments_with_lengths_weight_rows():
    values, lengths = torch.tensor([[1.0], [-2.0], [7.0]]), torch.tensor([3, 2, 0])
    check(Moments.of(values, torch.ones(3, 1), lengths), np.array([1.0, 1, 1, -2, -2]))
    halves = torch.tensor([[1.0, 1.0, 0], [-2, 0, 0], [0, 0, 0]])  # as many tokens where each of them is there
    check(Moments.of(halves, (halves != 0).float(), torch.tensor([2, 1, 0])), np.array([1.0, 1, -2]))
    check(Moments.of(torch.tensor([[1.0, 3.0], [5.0, 0.0]]), torch.tensor([[1.0, 1], [1, 0]]), torch.tensor([4, 3])),
          np.array([1.0, 1, 3, 3, 5, 5, 5]))  # fmt: skip


def test_whiten_with_equal_advantages_is_exactly_zero():
    """The rounded sum of equal numbers, divided by their count, mostly differs from the number."""
    for value, length in product((0.1, -1 / 3, 3.7e5), (1, 3, 10, 49, 1000)):
        values, mask = torch.full((3, length), value, dtype=torch.float64), torch.ones(3, length)
        parts = [Moments.of(values, mask), Moments.of(values[:1], mask[:1]), Moments()]
        assert not whiten(values, mask, sum(parts, Moments())).any()
        assert sum(parts, Moments()).variance == 0


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_whiten_on_ranks_equals_whole_batch(name):
    """The batch is in two parts of whole groups; each rank has its raw advantages and the summed moments."""
    rng = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(8, 5, generator=rng), torch.randn(8, 5, generator=rng)
    mask, ids = (torch.rand(8, 5, generator=rng) < 0.7).float(), torch.tensor([1, 1, 1, 1, 2, 2, 2, 2])
    whole = compute_advantages(name, token_rewards=rewards, mask=mask, values=values, group_ids=ids)
    ranks = [AdvantageInputs(rewards[s], mask[s], ids[s], values[s]) for s in (slice(0, 4), slice(4, 8))]
    raw = [estimator(name).raw(inputs) for inputs in ranks]
    moments = [Moments.of(r.advantages, i.mask) for r, i in zip(raw, ranks, strict=True)]
    both = Moments.merged(torch.stack([m.as_tensor() for m in moments]))
    parts = [whiten(r.advantages, i.mask, both) for r, i in zip(raw, ranks, strict=True)]
    torch.testing.assert_close(torch.cat(parts), whole.advantages, rtol=1e-6, atol=1e-7)
    assert torch.equal(torch.cat([r.returns for r in raw]), whole.returns)
