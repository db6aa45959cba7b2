"""Policy losses compared with scalar float64 arithmetic, and their gradients with finite differences."""

from __future__ import annotations

import math

import pytest
import torch

from mcore_rl.algorithms import compute_policy_loss, policy_loss
from mcore_rl.errors import ConfigError
from mcore_rl.types import Mean, merge_metrics


def by_hand(logp, old_logp, advantage, low, high, dual):
    ratio = math.exp(logp - old_logp)
    loss = max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))
    return min(loss, -advantage * dual) if dual is not None and advantage < 0 else loss


def tensors(seed=0, shape=(3, 40), spread=0.6):
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(shape, generator=g, dtype=torch.float64) * 3
    return {
        "logp": old + spread * torch.randn(shape, generator=g, dtype=torch.float64),
        "old_logp": old,
        "advantages": torch.randn(shape, generator=g, dtype=torch.float64),
        "mask": (torch.rand(shape, generator=g) < 0.8).double(),
    }


@pytest.mark.parametrize("options", [{}, {"clip_low": 0.2, "clip_high": 0.28}, {"clip_high": 0.4, "dual_clip": 1.5}])
def test_ppo_clip_matches_scalar_arithmetic(options):
    given = tensors()
    loss = compute_policy_loss("ppo_clip", **given, **options).loss
    low, high, dual = options.get("clip_low", 0.2), options.get("clip_high", 0.2), options.get("dual_clip")
    for index in torch.cartesian_prod(torch.arange(3), torch.arange(40)).tolist():
        row, column = index
        one = [given[name][row, column].item() for name in ("logp", "old_logp", "advantages")]
        expected = by_hand(*one, low, high, dual) if given["mask"][row, column] else 0.0
        assert loss[row, column].item() == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(("name", "options"), [("ppo_clip", {"dual_clip": 1.5}), ("ppo_clip", {}), ("sft", {})])
def test_policy_loss_gradient_matches_finite_differences(name, options):
    given = tensors(1, (2, 12))
    logp = given.pop("logp").requires_grad_()
    assert torch.autograd.gradcheck(lambda x: compute_policy_loss(name, logp=x, **given, **options).loss, logp)


def gradient(log_ratio, advantage, **options):
    logp = torch.tensor([[float(log_ratio)]], dtype=torch.float64, requires_grad=True)
    zero, one = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1)
    advantages = torch.full_like(zero, advantage)
    result = compute_policy_loss("ppo_clip", logp=logp, old_logp=zero, advantages=advantages, mask=one, **options)
    result.loss.sum().backward()
    return logp.grad.item(), result


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [
        (1.27, 1.0, False),  # inside: clip-higher leaves more room above
        (1.29, 1.0, True),
        (1.29, -1.0, False),  # pushing back towards 1 is never clipped
        (0.81, -1.0, False),
        (0.79, -1.0, True),
        (0.79, 1.0, False),
    ],
)
def test_ppo_clip_gradient_is_zero_for_clipped_tokens_only(ratio, advantage, clipped):
    grad, result = gradient(math.log(ratio), advantage, clip_low=0.2, clip_high=0.28)
    assert grad == (0.0 if clipped else pytest.approx(-advantage * ratio, rel=1e-12))
    assert result.metrics["clip_fraction"] == Mean(float(clipped), 1.0)


def test_dual_clip_caps_negative_advantages_only():
    grad, result = gradient(math.log(4.0), -2.0, dual_clip=3.0)
    assert grad == 0.0
    assert result.loss.item() == pytest.approx(6.0)
    assert result.metrics["dual_clip_fraction"] == Mean(1.0, 1.0)
    assert gradient(math.log(2.9), -2.0, dual_clip=3.0)[0] == pytest.approx(5.8)
    grad, result = gradient(math.log(0.1), 2.0, dual_clip=3.0)
    assert grad == pytest.approx(-0.2)
    assert result.metrics["dual_clip_fraction"] == Mean(0.0, 1.0)
    assert "dual_clip_fraction" not in gradient(0.0, 1.0)[1].metrics


def test_ppo_clip_at_equal_policies_has_gradient_minus_advantage():
    assert gradient(0.0, 1.7, clip_low=0.0, clip_high=0.0)[0] == pytest.approx(-1.7)


def test_ppo_clip_ignores_tokens_outside_mask():
    given = tensors(2)
    outside = given["mask"] == 0
    clean = compute_policy_loss("ppo_clip", **given, dual_clip=3.0)
    for name, junk in (("logp", math.nan), ("old_logp", -math.inf), ("advantages", math.inf)):
        given[name] = given[name].masked_fill(outside, junk)
    logp = given.pop("logp").requires_grad_()
    dirty = compute_policy_loss("ppo_clip", logp=logp, **given, dual_clip=3.0)
    dirty.loss.sum().backward()
    assert torch.equal(dirty.loss, clean.loss)
    assert dirty.metrics == clean.metrics
    assert torch.equal(logp.grad[outside], torch.zeros_like(logp.grad[outside]))
    assert logp.grad.isfinite().all()


def test_ppo_clip_metrics_of_parts_sum_to_whole():
    given = tensors(3)
    whole = compute_policy_loss("ppo_clip", **given, dual_clip=1.2).metrics
    parts = [
        compute_policy_loss("ppo_clip", **{k: v[rows] for k, v in given.items()}, dual_clip=1.2).metrics
        for rows in (slice(0, 1), slice(1, 3))
    ]
    merged = merge_metrics(parts)
    assert merged.keys() == whole.keys()
    for name, metric in whole.items():
        assert merged[name].value == pytest.approx(metric.value)
        if isinstance(metric, Mean):
            assert merged[name].count == given["mask"].sum()
    kl = ((given["old_logp"] - given["logp"]) * given["mask"]).sum() / given["mask"].sum()
    assert whole["ppo_kl"].value == pytest.approx(kl.item())


def test_ppo_clip_with_overflowing_ratio_is_finite():
    for advantage in (-1.0, 0.0, 1.0):
        grad, result = gradient(1000.0, advantage)
        assert math.isfinite(result.loss.item())
        assert math.isfinite(grad)


def test_ppo_clip_of_packed_tokens_equals_rows():
    given = tensors(4)
    rows = compute_policy_loss("ppo_clip", **given).loss
    packed = compute_policy_loss("ppo_clip", **{k: v.reshape(1, -1) for k, v in given.items()}).loss
    assert torch.equal(packed.reshape(rows.shape), rows)
    assert not policy_loss("ppo_clip").needs.whole_sequence


def test_sft_equals_cross_entropy():
    g = torch.Generator().manual_seed(5)
    logits = torch.randn(2, 7, 11, generator=g)
    targets = torch.randint(0, 11, (2, 7), generator=g)
    mask = torch.tensor([[1.0] * 7, [1.0] * 3 + [0.0] * 4])
    logp = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    loss = compute_policy_loss("sft", logp=logp, mask=mask).loss
    expected = torch.nn.functional.cross_entropy(logits[mask > 0], targets[mask > 0], reduction="sum")
    torch.testing.assert_close(loss.sum(), expected)


def test_policy_loss_needs_are_declared_and_checked():
    assert policy_loss("ppo_clip").needs.advantages
    assert policy_loss("ppo_clip").needs.old_logp
    assert not policy_loss("sft").needs.advantages
    assert not policy_loss("ppo_clip").needs.reference
    given = tensors()
    with pytest.raises(ValueError, match="old_logp"):
        compute_policy_loss("ppo_clip", **{**given, "old_logp": None})
    with pytest.raises(ValueError, match=r"advantages \[3, 1\]"):
        compute_policy_loss("ppo_clip", **{**given, "advantages": given["advantages"][:, :1]})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ppo-clip", {}, r"algorithm\.policy_loss\.name=ppo-clip .*did you mean ppo_clip"),
        ("nonsense", {}, r"name=nonsense is not known\. Known: ppo_clip, gspo, .*sft"),
        ("sft", {"clip_low": 0.2}, r"algorithm\.policy_loss\.clip_low"),
        ("ppo_clip", {"gamma": 1.0}, r"algorithm\.policy_loss\.gamma.*clip_low, clip_high, dual_clip"),
        ("ppo_clip", {"clip_low": -0.1}, r"algorithm\.policy_loss\.clip_low=-0\.1"),
        ("ppo_clip", {"clip_low": 1.5}, r"clip_low"),
        ("ppo_clip", {"clip_high": math.inf}, r"clip_high"),
        ("ppo_clip", {"dual_clip": 1.0}, r"algorithm\.policy_loss\.dual_clip=1\.0"),
    ],
)
def test_policy_loss_with_invalid_name_or_option_names_key(name, options, message):
    with pytest.raises(ConfigError, match=message):
        policy_loss(name, **options)


def test_policy_loss_with_null_options_uses_defaults():
    assert policy_loss("ppo_clip", clip_low=None, clip_high=None, dual_clip=None) == policy_loss("ppo_clip")
    assert policy_loss("sft", clip_low=None) == policy_loss("sft")
