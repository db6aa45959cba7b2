"""Aggregation modes compared with loops, and training weights compared with aggregation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.algorithms import aggregate_loss, loss_weights
from mcore_rl.algorithms.aggregation import MODE_OPTIONS
from mcore_rl.errors import ConfigError


def example(seed=0, rows=6, tokens=9):
    g = torch.Generator().manual_seed(seed)
    loss = torch.randn(rows, tokens, generator=g, dtype=torch.float64)
    mask = (torch.rand(rows, tokens, generator=g) < 0.6).double()
    mask[2] = 0
    return loss, mask


def by_loop(loss, mask, mode):
    rows = [[x for x, m in zip(r, q, strict=True) if m] for r, q in zip(loss.tolist(), mask.tolist(), strict=True)]
    rows = [row for row in rows if row]
    if mode == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if mode == "seq-mean-token-sum":
        return sum(map(sum, rows)) / len(rows)
    if mode == "seq-mean-token-mean":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    return sum(map(sum, rows)) / len(rows) / loss.shape[1]


@pytest.mark.parametrize("mode", MODE_OPTIONS)
def test_aggregate_loss_matches_loops_and_skips_empty_rows(mode):
    loss, mask = example()
    assert aggregate_loss(loss, mask, mode).item() == pytest.approx(by_loop(loss, mask, mode), rel=1e-12)


@pytest.mark.parametrize("mode", MODE_OPTIONS)
def test_loss_weights_sum_to_aggregate_and_equal_its_gradient(mode):
    loss, mask = example(1)
    loss.requires_grad_()
    options = {"norm_tokens": 17} if mode == "seq-mean-token-sum-norm" else {}
    weights = loss_weights(mode, mask.sum(-1).numpy().astype(np.int32), **options)
    assert weights.dtype == np.float32
    assert weights.shape == (6,)
    assert weights[2] == 0
    of_tokens = torch.from_numpy(weights).double()[:, None] * mask
    aggregate = aggregate_loss(loss, mask, mode, **options)
    aggregate.backward()
    torch.testing.assert_close((of_tokens * loss).sum(), aggregate, rtol=1e-6, atol=0)
    torch.testing.assert_close(loss.grad, of_tokens, rtol=1e-6, atol=0)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(list(MODE_OPTIONS)), st.integers(1, 5), st.integers(0, 1000))
def test_aggregate_loss_with_global_denominators_is_additive(mode, cut, seed):
    loss, mask = example(seed)
    norm = {"norm_tokens": 5} if mode == "seq-mean-token-sum-norm" else {}
    counts = {"num_tokens": mask.sum().item(), "num_sequences": (mask.sum(-1) > 0).sum().item()}
    counts = {name: count for name, count in counts.items() if name in MODE_OPTIONS[mode]}
    parts = sum(aggregate_loss(loss[rows], mask[rows], mode, **counts, **norm) for rows in (slice(cut), slice(cut, 6)))
    torch.testing.assert_close(parts, aggregate_loss(loss, mask, mode, **norm), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("mode", MODE_OPTIONS)
def test_aggregate_loss_without_trained_tokens_is_zero(mode):
    loss = torch.full((2, 3), torch.nan, requires_grad=True)
    total = aggregate_loss(loss, torch.zeros(2, 3), mode)
    total.backward()
    assert total.item() == 0
    assert torch.equal(loss.grad, torch.zeros(2, 3))
    with pytest.raises(ValueError, match="shape"):
        aggregate_loss(loss, torch.ones(2, 1), mode)


@pytest.mark.parametrize(
    ("mode", "options", "message"),
    [
        ("mean", {}, r"algorithm\.loss_aggregation=mean is not known. Known: token-mean"),
        ("token-mean", {"norm_tokens": 5}, r"norm_tokens.*it takes num_tokens"),
        ("seq-mean-token-sum-norm", {}, r"needs norm_tokens"),
        ("seq-mean-token-sum", {"num_sequences": 0}, r"num_sequences=0 must be greater than 0"),
    ],
)
def test_aggregate_loss_with_invalid_mode_or_option_raises(mode, options, message):
    with pytest.raises(ConfigError, match=message):
        loss_weights(mode, np.array([1, 2]), **options)
