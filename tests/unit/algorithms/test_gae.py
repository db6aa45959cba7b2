"""Token-level estimators, compared with definitions as sums over all later tokens in plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.algorithms import compute_advantages, estimator


def acted(rewards, mask):
    """List the trained positions of a response, each with the rewards up to the next one."""
    positions = [t for t in range(len(mask)) if mask[t] > 0]
    ends = [*positions, len(mask)][1:]
    return [(t, sum(rewards[t:end])) for t, end in zip(positions, ends, strict=True)]


def gae_by_definition(rewards, values, mask, gamma, lam):
    """Compute equation 16: the sum of all later temporal-difference errors, weighted by (gamma lam)^distance."""
    steps = acted(rewards, mask)
    result = np.zeros(len(mask))
    errors = []
    for n, (t, reward) in enumerate(steps):
        behind = values[steps[n + 1][0]] if n + 1 < len(steps) else 0.0
        errors.append(reward + gamma * behind - values[t])
    for n, (t, _) in enumerate(steps):
        result[t] = sum((gamma * lam) ** k * error for k, error in enumerate(errors[n:]))
    return result


def whitened(advantages, mask):
    chosen = advantages[mask > 0]
    if not len(chosen):
        return np.zeros_like(advantages)
    variance = chosen.var(ddof=1) if len(chosen) > 1 else 0.0
    return (advantages - chosen.mean()) / np.sqrt(variance + 1e-8) * (mask > 0)


def draw(seed, size, length):
    rng = np.random.default_rng(seed)
    mask = (rng.random((size, length)) < rng.choice([0.4, 0.8, 1.0])).astype(np.float64)
    mask[rng.random(size) < 0.2] = 0
    return rng.normal(size=(size, length)), rng.normal(size=(size, length)), mask


BATCHES = (st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 9))
FACTORS = st.sampled_from([0.0, 0.5, 0.95, 1.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=40, deadline=None)
@given(*BATCHES, FACTORS, FACTORS, st.booleans())
def test_gae_equals_weighted_sum_of_later_errors(dtype, seed, size, length, gamma, lam, whiten):
    rewards, values, mask = draw(seed, size, length)
    raw = np.stack([gae_by_definition(*row, gamma, lam) for row in zip(rewards, values, mask, strict=True)])
    result = compute_advantages(
        "gae",
        token_rewards=torch.tensor(rewards, dtype=dtype),
        mask=torch.tensor(mask, dtype=torch.float32),
        values=torch.tensor(values, dtype=dtype),
        gamma=gamma,
        lam=lam,
        whiten=whiten,
    )
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 2e-4, "atol": 2e-5}
    np.testing.assert_allclose(result.advantages, whitened(raw, mask) if whiten else raw, **tolerance)
    np.testing.assert_allclose(result.returns, (raw + values) * mask, **tolerance)


@settings(max_examples=40, deadline=None)
@given(*BATCHES, FACTORS)
def test_reinforce_plus_plus_whitens_discounted_returns(seed, size, length, gamma):
    rewards, _, mask = draw(seed, size, length)
    returns = np.zeros_like(rewards)
    for i in range(size):
        steps = acted(rewards[i], mask[i])
        for n, (t, _) in enumerate(steps):
            returns[i, t] = sum(gamma**k * reward for k, (_, reward) in enumerate(steps[n:]))
    result = compute_advantages(
        "reinforce_plus_plus", token_rewards=torch.tensor(rewards), mask=torch.tensor(mask), gamma=gamma
    )
    np.testing.assert_allclose(result.returns, returns, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(result.advantages, whitened(returns, mask), rtol=1e-9, atol=1e-9)


def test_gae_of_long_response_keeps_precision():
    """32,768 float32 tokens, each of which adds 0.1 to the sum."""
    length = 32768
    got = compute_advantages(
        "gae", token_rewards=torch.full((1, length), 0.1), mask=torch.ones(1, length), values=torch.zeros(1, length),
        whiten=False,
    )  # fmt: skip
    expected = np.float64(np.float32(0.1)) * np.arange(length, 0, -1)
    np.testing.assert_allclose(got.advantages[0], expected, rtol=1e-7)


def test_gae_accepts_strided_tensors():
    rewards, values, mask = (torch.tensor(a) for a in draw(2, 6, 6))
    plain = compute_advantages("gae", token_rewards=rewards, values=values, mask=mask)
    turned = compute_advantages(
        "gae", token_rewards=rewards.t().contiguous().t(), values=values.t().contiguous().t(),
        mask=torch.stack([mask, mask], -1)[..., 0],
    )  # fmt: skip
    assert torch.equal(plain.advantages, turned.advantages)
    assert torch.equal(plain.returns, turned.returns)


def test_gae_declares_needs_and_kind():
    assert estimator("gae").whitened
    assert not estimator("gae", whiten=False).whitened
    assert estimator("gae").needs.values
    assert not estimator("gae").per_response
    assert estimator("reinforce_plus_plus").whitened
    assert not estimator("reinforce_plus_plus").per_response
    assert estimator("reinforce_plus_plus_baseline").whitened
    assert not estimator("grpo").whitened
