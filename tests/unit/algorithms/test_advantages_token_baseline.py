"""The optimal token baseline compared with float64 loops written from the paper."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.algorithms import compute_advantages, estimator
from mcore_rl.algorithms.advantages.token_baseline import OptimalTokenBaseline
from mcore_rl.algorithms.interface import AdvantageInputs

NAME = "optimal_token_baseline"


def make_batch(seed, size, length, gaps=True):
    rng = np.random.default_rng(seed)
    ends = rng.integers(0, length + 1, size)
    mask = np.arange(length)[None] < ends[:, None]
    if gaps:
        mask &= rng.random((size, length)) < 0.8
    return SimpleNamespace(
        token_rewards=torch.from_numpy(rng.normal(size=(size, length)) * mask),
        mask=torch.from_numpy(mask).float(),
        group_ids=torch.from_numpy(rng.choice([-7, 3, 2**40], size)),
        score_norms=torch.from_numpy(rng.uniform(0.01, 2, (size, length))),
    )


def by_loop(batch):
    """Advantages by response, one list of its trained tokens each."""
    trained = [np.flatnonzero(row) for row in batch.mask.numpy()]
    rewards, norms = batch.token_rewards.numpy(), batch.score_norms.numpy()
    to_go = [[sum(rewards[i, s] for s in on[t:]) for t in range(len(on))] for i, on in enumerate(trained)]
    energy = [[sum(norms[i, s] for s in on[: t + 1]) for t in range(len(on))] for i, on in enumerate(trained)]
    found = []
    for i, on in enumerate(trained):
        row = []
        for t in range(len(on)):
            reach = [j for j in range(len(trained)) if batch.group_ids[j] == batch.group_ids[i] and t < len(trained[j])]
            baseline = sum(energy[j][t] * to_go[j][t] for j in reach) / sum(energy[j][t] for j in reach)
            row.append(to_go[i][t] - baseline)
        found.append(row)
    return found


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 7))
def test_token_baseline_matches_the_formula_in_loops(seed, size, length):
    batch = make_batch(seed, size, length)
    result = compute_advantages(NAME, **vars(batch))
    for i, expected in enumerate(by_loop(batch)):
        found = result.advantages[i][batch.mask[i] > 0].tolist()
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert not result.advantages[batch.mask == 0].any()


def test_token_baseline_minimizes_the_variance_of_the_gradient():
    """For scores that are independent of each other, the variance at token t is the sum of W_t (G - b)^2."""
    batch = make_batch(5, 8, 1, gaps=False)
    batch.group_ids, batch.mask = torch.zeros(8).long(), torch.ones(8, 1)
    returns, norms = batch.token_rewards[:, 0], batch.score_norms[:, 0]
    found = compute_advantages(NAME, **vars(batch)).advantages[:, 0]
    best = (norms * found.square()).sum()
    for shift in (-1e-3, 1e-3):
        assert (norms * (found + shift).square()).sum() > best
    assert (norms * (returns - returns.mean()).square()).sum() > best


@pytest.mark.parametrize("reward", [0.1, -1 / 3, 3.7e5])
def test_token_baseline_with_equal_rewards_gives_exactly_zero(reward):
    batch = make_batch(2, 9, 6)
    batch.token_rewards = torch.zeros(9, 6)
    for row, mask in enumerate(batch.mask):
        batch.token_rewards[row, -1 if not mask.any() else int(mask.nonzero()[-1])] = reward
    assert not compute_advantages(NAME, **vars(batch)).advantages.any()


def test_token_baseline_without_norms_uses_the_smallest_return():
    tensors = {"token_rewards": torch.tensor([[1.0], [3.0]]), "mask": torch.ones(2, 1)}
    found = compute_advantages(NAME, **tensors, group_ids=torch.zeros(2).long(), score_norms=torch.zeros(2, 1))
    assert found.advantages.tolist() == [[0], [2]]


def test_token_baseline_in_blocks_equals_whole_batch():
    batch = make_batch(3, 12, 5)
    whole = compute_advantages(NAME, **vars(batch)).advantages
    numbers = torch.unique(batch.group_ids, return_inverse=True)[1]
    blocks = [
        AdvantageInputs(batch.token_rewards[s], batch.mask[s], numbers[s], score_norms=batch.score_norms[s])
        for s in (slice(0, 5), slice(5, 5), slice(5, 12))
    ]
    parts = OptimalTokenBaseline().over_ranks(blocks, lambda tensor, kind: tensor)
    torch.testing.assert_close(torch.cat([part.advantages for part in parts]), whole, rtol=1e-12, atol=1e-12)


def test_token_baseline_declares_its_inputs():
    with pytest.raises(ValueError, match=f"{NAME} needs group_ids, score_norms"):
        compute_advantages(NAME, token_rewards=torch.zeros(1, 1), mask=torch.ones(1, 1))
    assert not estimator(NAME).per_response
