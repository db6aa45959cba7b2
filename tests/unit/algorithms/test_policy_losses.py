"""Clipping of PPO, the supervised loss, and names and options of policy losses."""

from __future__ import annotations

import math

import pytest
import torch

from mcore_rl.algorithms import compute_policy_loss, policy_loss
from mcore_rl.errors import ConfigError
from mcore_rl.types import Mean


def gradient(log_ratio, advantage, **options):
    logp = torch.tensor([[float(log_ratio)]], dtype=torch.float64, requires_grad=True)
    zero, one = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1)
    advantages = torch.full_like(zero, advantage)
    result = compute_policy_loss("ppo_clip", logp=logp, old_logp=zero, advantages=advantages, mask=one, **options)
    result.loss.sum().backward()
    return logp.grad.item(), result


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


def test_sft_equals_cross_entropy():
    g = torch.Generator().manual_seed(5)
    logits = torch.randn(2, 7, 11, generator=g, requires_grad=True)
    targets = torch.randint(0, 11, (2, 7), generator=g)
    mask = torch.tensor([[1.0] * 7, [1.0] * 3 + [0.0] * 4])
    logp = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    loss = compute_policy_loss("sft", logp=logp, mask=mask).loss
    expected = torch.nn.functional.cross_entropy(logits[mask > 0], targets[mask > 0], reduction="sum")
    torch.testing.assert_close(loss.sum(), expected)
    torch.testing.assert_close(*(torch.autograd.grad(total, logits) for total in (loss.sum(), expected)))


def test_policy_loss_needs_are_declared_and_checked():
    assert policy_loss("ppo_clip").needs.advantages
    assert policy_loss("ppo_clip").needs.old_logp
    assert not policy_loss("sft").needs.advantages
    assert not policy_loss("ppo_clip").needs.reference
    given = dict.fromkeys(("logp", "old_logp", "advantages", "mask"), torch.ones(3, 40))
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
        ("gspo", {"dual_clip": 3.0}, r"policy_loss\.dual_clip: not an option.*gspo; it takes clip_low, clip_high"),
        ("gspo", {"clip_low": 1.1}, r"policy_loss\.clip_low=1\.1"),
        ("gmpo", {"clip_low": -0.1}, r"policy_loss\.clip_low=-0\.1"),
        ("gmpo", {"clip_high": math.nan}, r"policy_loss\.clip_high=nan"),
        ("cispo", {"clip_high": -1.0}, r"policy_loss\.clip_high=-1\.0"),
        ("clip_cov", {"cov_ratio": 0.0}, r"policy_loss\.cov_ratio=0\.0"),
        ("clip_cov", {"cov_low": 5.0}, r"policy_loss\.cov_low=5\.0 must be less than .*cov_high=5\.0"),
        ("clip_cov", {"kl_coef": 1.0}, r"policy_loss\.kl_coef: not an option"),
        ("kl_cov", {"cov_ratio": 1.1}, r"policy_loss\.cov_ratio=1\.1"),
        ("kl_cov", {"kl_coef": -1.0}, r"policy_loss\.kl_coef=-1\.0"),
        ("kl_cov", {"clip_low": 0.2}, r"policy_loss\.clip_low: not an option"),
        ("decoupled_ppo", {"prox": "nearest"}, r"policy_loss\.prox=nearest .*recomputed, loglinear, metrics"),
        ("decoupled_ppo", {"dual_clip": 0.5}, r"policy_loss\.dual_clip=0\.5"),
        ("cispo", {"anchor": "engine"}, r"policy_loss\.anchor=engine .*Known: old, rollout"),
        ("sapo", {"tau_pos": 0.0}, r"policy_loss\.tau_pos=0\.0 must be finite and greater than 0"),
        ("sapo", {"tau_neg": math.inf}, r"policy_loss\.tau_neg=inf"),
        ("sapo", {"clip_low": 0.2}, r"policy_loss\.clip_low: not an option.*it takes tau_pos, tau_neg"),
        ("dppo_tv", {"clip_high": -0.1}, r"policy_loss\.clip_high=-0\.1"),
        ("dppo_kl", {"clip_low": math.inf}, r"policy_loss\.clip_low=inf"),
        ("dppo_kl", {"ratio_cap": 1.0}, r"policy_loss\.ratio_cap=1\.0 must be finite and greater than 1"),
        ("dppo_tv", {"anchor": "prox"}, r"policy_loss\.anchor=prox"),
        ("vespo", {"k_neg": -1.0}, r"policy_loss\.k_neg=-1\.0"),
        ("vespo", {"lambda_pos": 0.0}, r"policy_loss\.lambda_pos=0\.0"),
        ("dro", {"beta": -1.0}, r"policy_loss\.beta=-1\.0"),
        ("fipo", {"decay_tokens": 0.0}, r"policy_loss\.decay_tokens=0\.0"),
        ("fipo", {"influence_low": 1.0}, r"policy_loss\.influence_low=1\.0 must be at least 0 and less than 1"),
        ("fipo", {"influence_high": -0.1}, r"policy_loss\.influence_high=-0\.1"),
        ("fipo", {"safety_ratio": -1.0}, r"policy_loss\.safety_ratio=-1\.0"),
        ("reinforce", {"clip_low": 0.2}, r"takes no options"),
    ],
)
def test_policy_loss_with_invalid_name_or_option_names_key(name, options, message):
    with pytest.raises(ConfigError, match=message):
        policy_loss(name, **options)


def test_policy_loss_with_null_options_uses_defaults():
    assert policy_loss("ppo_clip", clip_low=None, clip_high=None, dual_clip=None) == policy_loss("ppo_clip")
    assert policy_loss("sft", clip_low=None) == policy_loss("sft")
