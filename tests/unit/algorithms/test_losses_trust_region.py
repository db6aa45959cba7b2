"""Losses whose trust region is not a clip of the token's ratio: divergences, gates, sequences."""

from __future__ import annotations

import math

import pytest
import torch

from mcore_rl.algorithms import aggregate_loss, compute_policy_loss
from mcore_rl.algorithms.losses.future import discounted_future
from tests.unit.algorithms.test_policy_losses_catalogue import evaluate, make


def one_token(name, logp, anchor, advantage, **options):
    """Return the loss and its gradient for one token with the engine's log-probability `anchor`."""
    given = {key: torch.full((1, 1), value, dtype=torch.float64) for key, value in
             (("logp", logp), ("old_logp", anchor), ("rollout_logp", anchor), ("advantages", advantage))}  # fmt: skip
    result, gradient = evaluate(name, given | {"mask": torch.ones(1, 1)}, options, torch.ones(1, 1))
    return result.loss.item(), gradient.item()


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_dppo_trains_rare_tokens_that_ppo_clips(name):
    """A ratio of 100 of a rare token is a small divergence; a ratio of 0.8 of a frequent one is a large one."""
    rare, frequent = (math.log(1e-3), math.log(1e-5), 1.0), (math.log(0.79), math.log(0.99), -1.0)
    assert one_token(name, *rare) == pytest.approx((-100.0, -100.0))
    assert one_token("ppo_clip", *rare)[1] == 0.0
    assert one_token(name, *frequent) == (0.0, 0.0)
    assert one_token("ppo_clip", *frequent, clip_low=0.21)[1] != 0.0
    # A token that moves back towards the engine is never left out.
    assert one_token(name, math.log(0.79), math.log(0.99), 1.0)[1] == pytest.approx(-0.79 / 0.99)


def test_dppo_ratio_cap_bounds_the_gradient():
    logp, anchor = math.log(1e-3), math.log(1e-5)
    assert one_token("dppo_tv", logp, anchor, -2.0, ratio_cap=20.0) == pytest.approx((40.0, 40.0))
    # Without a cap, a ratio above exp(20) has no gradient, as in the other losses.
    assert one_token("dppo_tv", -1.0, -25.0, -2.0)[1] == 0.0
    assert one_token("dppo_tv", -1.0, -25.0, -2.0, ratio_cap=20.0)[1] == pytest.approx(40.0)


def test_gates_of_soft_losses_are_reported():
    given = make(8)
    selected = given["mask"] > 0
    ratio = (given["logp"] - given["old_logp"]).exp()
    tau = torch.where(given["advantages"] > 0, 1.0, 1.05).double()
    gate = (tau * (ratio - 1)).sigmoid()
    expected = (4 * gate * (1 - gate))[selected].mean().item()
    assert compute_policy_loss("sapo", **given).metrics["gate_weight"].value == pytest.approx(expected, rel=1e-6)
    loss = compute_policy_loss("vespo", **given)
    weight = -loss.loss / (given["advantages"] * given["logp"])
    assert loss.metrics["gate_weight"].value == pytest.approx(weight[selected].mean().item())


def test_luspo_equals_gspo_with_sums_over_tokens():
    """arXiv 2602.05261: mean over responses of |o| min(s A, clip(s) A), with one advantage per response."""
    given = make(11)
    given["advantages"] = given["advantages"][:, :1].expand(5, 9).contiguous()
    bounds = {"clip_low": 2e-3, "clip_high": 2.5e-3}
    logp = given["logp"].clone().requires_grad_()
    result = compute_policy_loss("gspo", **{**given, "logp": logp}, **bounds)
    aggregate_loss(result.loss, given["mask"], "seq-mean-token-sum").backward()
    other = given["logp"].clone().requires_grad_()
    objective = []
    for row, old, mask, advantage in zip(
        other, given["old_logp"], given["mask"], given["advantages"][:, 0], strict=True
    ):
        if mask.any():
            length = mask.sum()
            ratio = (((row - old) * mask).sum() / length).exp()
            objective.append(length * torch.minimum(ratio * advantage, ratio.clamp(1 - 2e-3, 1 + 2.5e-3) * advantage))
    (-torch.stack(objective).mean()).backward()
    torch.testing.assert_close(logp.grad, other.grad)


def test_dppo_mask_anchor_changes_the_mask_only():
    """A token that moved towards the engine and away from the recomputed policy; the ratio stays at the engine."""
    logp, old, engine = math.log(0.6), math.log(0.4), math.log(0.9)
    values = {"logp": logp, "old_logp": old, "rollout_logp": engine, "mask": 1.0}
    given = {key: torch.full((1, 1), value, dtype=torch.float64) for key, value in values.items()}
    ones = torch.ones(1, 1)
    for mask_anchor, advantage, expected in ((None, -1.0, 0.0), ("old", -1.0, 0.6 / 0.9), ("old", 1.0, 0.0)):
        given["advantages"] = torch.full((1, 1), advantage, dtype=torch.float64)
        result, gradient = evaluate("dppo_tv", given, {"mask_anchor": mask_anchor}, ones)
        assert (result.loss.item(), gradient.item()) == pytest.approx((expected, expected)), (mask_anchor, advantage)


@pytest.mark.parametrize("holes", [False, True])
def test_discounted_future_of_long_rows_matches_loop(holes):
    """Rows of several blocks, one of blocks of blocks, with tokens at the end or in between that are not selected."""
    g = torch.Generator().manual_seed(0)
    lengths, width = torch.tensor([64 * 64 + 70, 65, 0]), 64 * 64 + 130
    selected = torch.arange(width) < lengths[:, None]
    if holes:
        selected &= torch.rand(3, width, generator=g) < 0.8
    values, gamma = torch.randn(3, width, generator=g, dtype=torch.float64), 2 ** (-1 / 500)
    expected = torch.zeros_like(values)
    for row in range(3):
        total = 0.0
        for t in reversed(range(width)):
            if selected[row, t]:
                total = float(values[row, t]) + gamma * total
                expected[row, t] = total
    torch.testing.assert_close(discounted_future(values, selected, gamma), expected, rtol=1e-11, atol=1e-11)
