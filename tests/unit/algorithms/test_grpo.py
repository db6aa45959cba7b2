"""Group-relative advantages compared with a plain float64 loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.algorithms import compute_advantages, estimator
from mcore_rl.errors import ConfigError


def by_loop(rewards, ids, normalize_by_std):
    rewards, result = np.asarray(rewards, np.float64), np.zeros(len(ids))
    for group in set(ids):
        rows = [i for i, other in enumerate(ids) if other == group]
        values = rewards[rows]
        for row in rows:
            result[row] = rewards[row] - values.mean()
            if normalize_by_std and len(rows) > 1:
                result[row] /= values.std(ddof=1) + 1e-6
    return result


def per_response(rewards, ids, **options):
    rewards = torch.as_tensor(np.asarray(rewards, np.float32))[:, None]
    ids = torch.as_tensor(np.asarray(ids, np.int64))
    return compute_advantages(
        "grpo", token_rewards=rewards, mask=torch.ones_like(rewards), group_ids=ids, **options
    ).advantages[:, 0]


@pytest.mark.parametrize("normalize_by_std", [True, False])
def test_grpo_with_unsorted_groups_matches_loop(normalize_by_std):
    rng = np.random.default_rng(0)
    ids = rng.choice([7, -3, 2**62, 0, 123456789], 64)
    rewards = rng.normal(size=64)
    got = per_response(rewards, ids, normalize_by_std=normalize_by_std)
    np.testing.assert_allclose(got, by_loop(rewards, ids, normalize_by_std), rtol=2e-6, atol=2e-6)


def test_grpo_normalizes_by_std_by_default():
    assert torch.equal(per_response([0, 1, 1], [5, 5, 5]), per_response([0, 1, 1], [5, 5, 5], normalize_by_std=True))


@settings(max_examples=100, deadline=None)
@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 33), st.booleans())
def test_grpo_with_equal_rewards_is_exactly_zero(reward, size, normalize_by_std):
    got = per_response([reward] * size + [1.0, 2.0], [9] * size + [4, 4], normalize_by_std=normalize_by_std)
    assert torch.equal(got[:size], torch.zeros(size))
    assert got[-1] > 0


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_grpo_ignores_group_ids_and_follows_order_of_responses(data):
    size = data.draw(st.integers(1, 24))
    ids = np.array(data.draw(st.lists(st.integers(0, 4), min_size=size, max_size=size)))
    rewards = data.draw(st.lists(st.sampled_from([0.0, 1.0, -1.0, 0.5]), min_size=size, max_size=size))
    names = np.array(data.draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=5, max_size=5, unique=True)))
    order = np.array(data.draw(st.permutations(range(size))))
    plain = per_response(rewards, ids)
    assert torch.equal(per_response(rewards, names[ids]), plain)
    torch.testing.assert_close(per_response(np.array(rewards)[order], ids[order]), plain[order], rtol=1e-6, atol=1e-6)


def test_grpo_assigns_advantage_to_trained_tokens_only():
    rewards = torch.zeros(2, 4)
    rewards[0, 3], rewards[1, 2] = 1.0, 3.0  # the first reward is on a token that is not trained
    mask = torch.tensor([[1.0, 0, 1, 0], [1, 1, 1, 0]])
    result = compute_advantages(
        "grpo", token_rewards=rewards, mask=mask, group_ids=torch.tensor([1, 1]), normalize_by_std=False
    )
    assert torch.equal(result.advantages, torch.tensor([[-1.0, 0, -1, 0], [1, 1, 1, 0]]))
    assert torch.equal(result.returns, result.advantages)


def test_grpo_with_large_offset_keeps_differences():
    got = per_response([1e6, 1e6 + 1, 1e6, 1e6 + 1], [0, 0, 0, 0], normalize_by_std=False)
    assert torch.equal(got, torch.tensor([-0.5, 0.5, -0.5, 0.5]))


def test_grpo_without_group_ids_raises():
    assert estimator("grpo").needs.group_ids
    assert not estimator("grpo").needs.critic
    assert estimator("grpo").per_response
    with pytest.raises(ValueError, match="group_ids"):
        compute_advantages("grpo", token_rewards=torch.zeros(2, 3), mask=torch.ones(2, 3))


def test_compute_advantages_with_unknown_name_or_option_names_key():
    tensors = {"token_rewards": torch.zeros(1, 1), "mask": torch.ones(1, 1), "group_ids": torch.tensor([0])}
    with pytest.raises(ConfigError, match=r"algorithm\.advantage=grop .*did you mean grpo"):
        compute_advantages("grop", **tensors)
    with pytest.raises(ConfigError, match=r"algorithm\.gamma.*normalize_by_std"):
        compute_advantages("grpo", **tensors, gamma=0.9)
