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


GROUPS = torch.tensor([7, -3, 5, 7, -3, 5])
"""Unsorted groups; row 2 of group 5 has no trained token."""


def by_prompt(loss, mask, groups):
    """Mean over prompts with a trained token of the mean over all tokens of the prompt's responses."""
    means = []
    for group in set(groups.tolist()):
        rows = [i for i, each in enumerate(groups.tolist()) if each == group]
        tokens = [x for i in rows for x, m in zip(loss[i].tolist(), mask[i].tolist(), strict=True) if m]
        means += [sum(tokens) / len(tokens)] if tokens else []
    return sum(means) / len(means)


def by_loop(loss, mask, mode):
    if mode == "prompt-mean":
        return by_prompt(loss, mask, GROUPS)
    rows = [[x for x, m in zip(r, q, strict=True) if m] for r, q in zip(loss.tolist(), mask.tolist(), strict=True)]
    rows = [row for row in rows if row]
    if mode == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if mode == "seq-mean-token-sum":
        return sum(map(sum, rows)) / len(rows)
    if mode == "seq-mean-token-mean":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    if mode == "token-sum":
        return sum(map(sum, rows))
    return sum(map(sum, rows)) / len(rows) / loss.shape[1]


@pytest.mark.parametrize("mode", MODE_OPTIONS)
def test_aggregate_loss_matches_loops_and_skips_empty_rows(mode):
    loss, mask = example()
    assert aggregate_loss(loss, mask, mode, group_ids=GROUPS).item() == pytest.approx(
        by_loop(loss, mask, mode), rel=1e-12
    )


@pytest.mark.parametrize("mode", MODE_OPTIONS)
def test_loss_weights_sum_to_aggregate_and_equal_its_gradient(mode):
    loss, mask = example(1)
    loss.requires_grad_()
    options = {"norm_tokens": 17} if mode == "seq-mean-token-sum-norm" else {}
    weights = loss_weights(mode, mask.sum(-1).numpy().astype(np.int32), GROUPS.numpy(), **options)
    assert weights.dtype == np.float32
    assert weights.shape == (6,)
    assert weights[2] == 0
    of_tokens = torch.from_numpy(weights).double()[:, None] * mask
    aggregate = aggregate_loss(loss, mask, mode, group_ids=GROUPS, **options)
    aggregate.backward()
    torch.testing.assert_close((of_tokens * loss).sum(), aggregate, rtol=1e-6, atol=0)
    torch.testing.assert_close(loss.grad, of_tokens, rtol=1e-6, atol=0)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(list(MODE_OPTIONS)), st.integers(1, 5), st.integers(0, 1000))
def test_aggregate_loss_with_global_denominators_is_additive(mode, cut, seed):
    loss, mask = example(seed)
    groups = torch.arange(6) // max(cut, 1)  # a block of prompt-mean has whole groups
    if mode == "prompt-mean":
        cut = cut if cut in (1, 2, 3) else 0
    norm = {"norm_tokens": 5} if mode == "seq-mean-token-sum-norm" else {}
    counts = {"num_tokens": mask.sum().item(), "num_sequences": (mask.sum(-1) > 0).sum().item()}
    counts["num_prompts"] = len(groups[mask.sum(-1) > 0].unique())
    counts = {name: count for name, count in counts.items() if name in MODE_OPTIONS[mode]}
    parts = sum(
        aggregate_loss(loss[rows], mask[rows], mode, group_ids=groups[rows], **counts, **norm)
        for rows in (slice(cut), slice(cut, 6))
    )
    whole = aggregate_loss(loss, mask, mode, group_ids=groups, **norm)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-14)


def test_prompt_mean_weighs_prompts_equally_and_skips_empty_ones():
    """Prompt 4 has 1 + 3 tokens, prompt 9 has 2, and prompt 2 has none."""
    weights = loss_weights("prompt-mean", np.array([1, 2, 0, 3, 0]), np.array([4, 9, 2, 4, 9]))
    assert weights.tolist() == [1 / 8, 1 / 4, 0, 1 / 8, 0]


@pytest.mark.parametrize(("groups", "message"), [(None, "prompt-mean needs group_ids"), ([1], r"group_ids \[1\]")])
def test_prompt_mean_without_a_group_per_response_raises(groups, message):
    with pytest.raises(ValueError, match=message):
        loss_weights("prompt-mean", np.array([1, 2]), None if groups is None else np.array(groups))


@pytest.mark.parametrize("mode", MODE_OPTIONS)
def test_aggregate_loss_without_trained_tokens_is_zero(mode):
    loss = torch.full((2, 3), torch.nan, requires_grad=True)
    total = aggregate_loss(loss, torch.zeros(2, 3), mode, group_ids=torch.zeros(2).long())
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
        ("token-sum", {"num_tokens": 5}, r"num_tokens.*it takes no options"),
        ("seq-mean-token-sum", {"num_sequences": 0}, r"num_sequences=0 must be greater than 0"),
    ],
)
def test_aggregate_loss_with_invalid_mode_or_option_raises(mode, options, message):
    with pytest.raises(ConfigError, match=message):
        loss_weights(mode, np.array([1, 2]), **options)
