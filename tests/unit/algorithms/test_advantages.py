"""Per-response estimators, compared with plain float64 loops written from the papers."""

from __future__ import annotations

import math
from statistics import fmean, stdev
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.algorithms import compute_advantages, estimator
from mcore_rl.algorithms.interface import AdvantageInputs
from mcore_rl.algorithms.registry import ADVANTAGES
from mcore_rl.errors import ConfigError

GROUPED = ["grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"]
REQUIRED = {"gdpo": {"part_weights": {"format": 1.0}}}
"""Options without which an estimator cannot be built."""


def sample_std(values):
    return stdev(values) if len(values) > 1 else 0.0


def members(ids, i):
    return [j for j in range(len(ids)) if ids[j] == ids[i]]


def grpo(i, rewards, ids, lengths):
    group = [rewards[j] for j in members(ids, i)]
    return (rewards[i] - fmean(group)) / (sample_std(group) + 1e-6)


def dr_grpo(i, rewards, ids, lengths):
    return rewards[i] - fmean([rewards[j] for j in members(ids, i)])


def gain_over_others(i, rewards, ids, lengths):
    """Decrease of the group's best reward if response i is removed."""
    group = [rewards[j] for j in members(ids, i)]
    others = [rewards[j] for j in members(ids, i) if j != i]
    return max(group) - max(others) if others else 0.0


def others_mean(i, rewards, ids):
    others = [rewards[j] for j in members(ids, i) if j != i]
    return fmean(others) if others else rewards[i]


def grpo_leave_one_out(i, rewards, ids, lengths):
    group = [rewards[j] for j in members(ids, i)]
    return (rewards[i] - others_mean(i, rewards, ids)) / (sample_std(group) + 1e-6)


def grpo_batch(i, rewards, ids, lengths):
    raw = [dr_grpo(j, rewards, ids, lengths) for j in range(len(ids))]
    return raw[i] / (sample_std(raw) + 1e-6)


def grpo_batch_rewards(i, rewards, ids, lengths):
    return dr_grpo(i, rewards, ids, lengths) / (sample_std(rewards) + 1e-6)


def grpo_batch_leave_one_out(i, rewards, ids, lengths):
    raw = [rewards[j] - others_mean(j, rewards, ids) for j in range(len(ids))]
    return raw[i] / (sample_std(raw) + 1e-6)


def grpo_passk(i, rewards, ids, lengths):
    return gain_over_others(i, rewards, ids, lengths) / (sample_std([rewards[j] for j in members(ids, i)]) + 1e-6)


def rloo(i, rewards, ids, lengths):
    others = [rewards[j] for j in members(ids, i) if j != i]
    return rewards[i] - fmean(others) if others else 0.0


def opo(i, rewards, ids, lengths):
    group = members(ids, i)
    tokens = sum(lengths[j] for j in group)
    return rewards[i] - math.fsum(lengths[j] * rewards[j] for j in group) / tokens if tokens else 0.0


def gpg(i, rewards, ids, lengths):
    signal = [j for j in range(len(ids)) if len({rewards[k] for k in members(ids, j)}) > 1]
    return dr_grpo(i, rewards, ids, lengths) * len(ids) / max(len(signal), 1)


def reinforce_plus_plus_baseline(i, rewards, ids, lengths):
    every_token = [dr_grpo(j, rewards, ids, lengths) for j in range(len(ids)) for _ in range(lengths[j])]
    if not every_token:
        return 0.0
    variance = sample_std(every_token) ** 2
    return (dr_grpo(i, rewards, ids, lengths) - fmean(every_token)) / math.sqrt(variance + 1e-8)


CASES = [
    ("grpo", {}, grpo),
    ("grpo", {"normalize_by_std": False}, dr_grpo),
    ("grpo", {"leave_one_out": True}, grpo_leave_one_out),
    ("grpo", {"leave_one_out": True, "normalize_by_std": False}, rloo),
    ("grpo", {"std_level": "batch"}, grpo_batch),
    ("grpo", {"std_level": "batch_rewards"}, grpo_batch_rewards),
    ("grpo", {"std_level": "batch", "leave_one_out": True}, grpo_batch_leave_one_out),
    ("grpo_passk", {}, grpo_passk),
    ("grpo_passk", {"normalize_by_std": False}, gain_over_others),
    ("rloo", {}, rloo),
    ("opo", {}, opo),
    ("gpg", {}, gpg),
    ("reinforce_plus_plus_baseline", {}, reinforce_plus_plus_baseline),
]


def make_batch(seed, size, length, values=None):
    """Unsorted groups of any size, masks with gaps, rows without trained tokens, rewards on any token."""
    rng = np.random.default_rng(seed)
    mask = (rng.random((size, length)) < rng.choice([0.3, 0.9, 1.0])).astype(np.float32)
    mask[rng.random(size) < 0.2] = 0
    rewards = np.zeros((size, length), np.float32)
    scores = rng.normal(size=size) if values is None else rng.choice(values, size)
    rewards[np.arange(size), rng.integers(0, length, size)] = scores.astype(np.float32)
    ids = rng.choice(rng.integers(-(2**63), 2**63 - 1, max(1, size // 4)), size)
    return SimpleNamespace(
        token_rewards=torch.from_numpy(rewards), mask=torch.from_numpy(mask), group_ids=torch.from_numpy(ids)
    )


@pytest.mark.parametrize(("name", "options", "reference"), CASES)
@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 7), st.sampled_from([None, [0.0, 1.0], [-1.0, 0.1, 2]])
)
def test_estimators_match_formulas_in_plain_loops(name, options, reference, seed, size, length, values):
    batch = make_batch(seed, size, length, values)
    rewards, ids = batch.token_rewards.double().sum(-1).tolist(), batch.group_ids.tolist()
    lengths = [int(n) for n in batch.mask.sum(-1)]
    expected = np.array([reference(i, rewards, ids, lengths) for i in range(size)])[:, None] * batch.mask.numpy()
    result = compute_advantages(name, **vars(batch), **options)
    assert result.advantages.dtype == result.returns.dtype == torch.float32
    np.testing.assert_allclose(result.advantages.numpy(), expected, rtol=2e-5, atol=2e-6)
    if not estimator(name).whitened:
        assert torch.equal(result.returns, result.advantages)
    # Called like the driver: a column of rewards and the number of tokens of each response.
    column = compute_advantages(
        name,
        token_rewards=batch.token_rewards.sum(-1, keepdim=True),
        mask=torch.ones(size, 1),
        group_ids=batch.group_ids,
        lengths=batch.mask.sum(-1).int(),
        **options,
    ).advantages
    np.testing.assert_allclose((column * batch.mask).numpy(), expected, rtol=2e-5, atol=2e-6)
    assert estimator(name).per_response


def column(name, rewards, ids, **options):
    rewards = torch.tensor(rewards, dtype=torch.float32)[:, None]
    mask = torch.ones_like(rewards)
    return (
        compute_advantages(name, token_rewards=rewards, mask=mask, group_ids=torch.tensor(ids), **options)
        .advantages[:, 0]
        .tolist()
    )


def test_grpo_with_large_offset_keeps_differences():
    assert column("grpo", [1e6, 1e6 + 1] * 2, [0] * 4, normalize_by_std=False) == [-0.5, 0.5, -0.5, 0.5]


def test_remax_subtracts_the_greedy_reward():
    rewards, mask = torch.zeros(2, 3), torch.tensor([[1.0, 0, 1], [0, 0, 0]])
    rewards[:, 2] = torch.tensor([1.0, 4.0])
    result = compute_advantages("remax", token_rewards=rewards, mask=mask, baseline_rewards=torch.tensor([0.25, 1.0]))
    assert result.advantages.tolist() == [[0.75, 0, 0.75], [0, 0, 0]]
    assert result.returns.tolist() == [[1, 0, 1], [0, 0, 0]]
    assert estimator("remax").needs.baseline_rewards
    assert not estimator("remax").needs.group_ids


@pytest.mark.parametrize("name", GROUPED)
@settings(max_examples=20, deadline=None)
@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 33))
def test_estimators_with_equal_rewards_give_exactly_zero(name, reward, size):
    """Compare raw advantages: whitening would subtract the mean over all tokens, which is not 0."""
    rewards = torch.tensor([reward] * size + [1.0, 2.0])[:, None]
    lengths = torch.arange(1, size + 3)
    groups = torch.tensor([9] * size + [4, 4])
    inputs = AdvantageInputs(rewards, torch.ones_like(rewards), group_ids=groups, lengths=lengths)
    raw = estimator(name).raw(inputs).advantages[:, 0]
    assert raw[:size].tolist() == [0.0] * size
    assert raw[-1] > 0
    alone = column(name, [reward] * size, [9] * size, lengths=lengths[:size])
    assert alone == [0.0] * size


@pytest.mark.parametrize("name", GROUPED)
def test_estimators_ignore_order_and_ids_of_groups(name):
    batch = make_batch(3, 40, 3, [0.0, 1.0, 0.5])
    plain = compute_advantages(name, **vars(batch)).advantages
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    names, where = torch.unique(batch.group_ids, return_inverse=True)
    renamed = torch.tensor([-(2**63), 2**63 - 1, 0, 1, -1, 5, 64, 2**32, 2**33, -7])[: len(names)][where]
    shuffled = compute_advantages(
        name, token_rewards=batch.token_rewards[order], mask=batch.mask[order], group_ids=renamed[order]
    ).advantages
    torch.testing.assert_close(shuffled, plain[order], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_estimators_accept_empty_batches(name):
    for shape in ((0, 4), (3, 0), (0, 0), (4, 3)):
        given = {"token_rewards": torch.randn(shape), "mask": torch.zeros(shape), "values": torch.randn(shape)}
        given["token_rewards"] = given["token_rewards"].abs()
        given |= {"baseline_rewards": torch.zeros(shape[0]), "group_ids": torch.arange(shape[0])}
        given["score_norms"] = torch.rand(shape)
        given["parts"] = {"format": torch.zeros(shape[0])}
        result = compute_advantages(name, **given, **REQUIRED.get(name, {}))
        assert result.advantages.shape == result.returns.shape == shape
        assert not result.advantages.any()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_estimators_ignore_values_of_untrained_tokens(name):
    """Values of untrained tokens are NaN; results are finite and have no gradient."""
    batch = make_batch(5, 12, 6, [0.0, 0.5, 1.0])
    values = torch.where(batch.mask > 0, torch.randn(12, 6), torch.nan).requires_grad_()
    inputs = {**vars(batch), "values": values, "baseline_rewards": torch.zeros(12)}
    inputs["score_norms"] = torch.where(batch.mask > 0, torch.rand(12, 6), torch.nan)
    inputs |= {"parts": {"format": torch.arange(12.0)}, **REQUIRED.get(name, {})}
    result = compute_advantages(name, **inputs)
    for tensor in (result.advantages, result.returns):
        assert tensor.isfinite().all()
        assert not tensor[batch.mask == 0].any()
        assert not tensor.requires_grad


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_estimators_return_dtype_of_rewards(name, dtype):
    batch = make_batch(6, 8, 4, [0.0, 1.0])
    inputs = {**vars(batch), "values": torch.zeros(8, 4), "baseline_rewards": torch.zeros(8)}
    inputs["score_norms"] = torch.ones(8, 4)
    inputs |= {"parts": {"format": torch.arange(8.0)}, **REQUIRED.get(name, {})}
    exact = compute_advantages(name, **inputs)
    inputs["token_rewards"] = inputs["token_rewards"].to(dtype)
    for mask in (batch.mask, batch.mask.bool(), batch.mask.long()):
        inputs["mask"] = mask
        result = compute_advantages(name, **inputs)
        assert result.advantages.dtype == result.returns.dtype == dtype
        torch.testing.assert_close(result.advantages.float(), exact.advantages, rtol=1e-2, atol=1e-6)


def test_compute_advantages_with_invalid_tensors_names_them():
    good = {"token_rewards": torch.zeros(3, 2), "mask": torch.ones(3, 2), "group_ids": torch.arange(3)}
    for change, message in [
        ({"mask": torch.ones(3, 1)}, r"mask \[3, 1\]"),
        ({"group_ids": torch.arange(2)}, r"group_ids \[2\]"),
        ({"group_ids": torch.zeros(3)}, "integers"),
        ({"lengths": torch.ones(3, 2)}, r"lengths \[3, 2\]"),
        ({"parts": {"format": torch.ones(2)}}, r"part format \[2\]"),
        ({"token_rewards": torch.zeros(3, 2, dtype=torch.int64)}, "floating point"),
        ({"token_rewards": torch.tensor([[0, 1], [0, torch.nan], [torch.inf, -torch.inf]])}, r"2 responses.*\[1, 2\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            compute_advantages("grpo", **{**good, **change})
    huge = torch.full((3, 2), 3e38)  # finite, but their sum overflows
    assert not compute_advantages("rloo", **{**good, "token_rewards": huge}).advantages.any()
    with pytest.raises(ValueError, match=r"baseline_rewards.*\[2\]"):
        compute_advantages("remax", **good, baseline_rewards=torch.tensor([0, 1, torch.nan]))


def test_estimator_with_invalid_discount_names_key():
    for name in ("gae", "reinforce_plus_plus"):
        with pytest.raises(ConfigError, match=r"algorithm\.gamma=1\.5 must be between 0 and 1"):
            estimator(name, gamma=1.5)
    with pytest.raises(ConfigError, match="not an option"):
        estimator("rloo", gamma=0.5)
    with pytest.raises(ConfigError, match=r"algorithm\.lam=-1"):
        estimator("gae", lam=-1)


def test_compute_advantages_with_unknown_name_or_missing_input_names_it():
    tensors = {"token_rewards": torch.zeros(1, 1), "mask": torch.ones(1, 1)}
    with pytest.raises(ValueError, match="grpo needs group_ids"):
        compute_advantages("grpo", **tensors)
    with pytest.raises(ConfigError, match=r"algorithm\.advantage=grop .*did you mean grpo"):
        compute_advantages("grop", **tensors)
    with pytest.raises(ConfigError, match=r"algorithm\.gamma.*normalize_by_std"):
        compute_advantages("grpo", **tensors, gamma=0.9)
