"""Terms added to the policy loss, compared with exact divergences over a whole vocabulary."""

from __future__ import annotations

import pytest
import torch

from mcore_rl.algorithms.interface import PolicyLossInputs
from mcore_rl.algorithms.terms import add_terms, terms_need_old_logp
from mcore_rl.config.algorithm import AlgorithmConfig, DriftPenaltyConfig, KLConfig


def distributions() -> torch.Tensor:
    """Return logits of policy, old policy and reference over 30 tokens."""
    return torch.randn(3, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def terms(config: AlgorithmConfig, inputs: PolicyLossInputs, ref: torch.Tensor | None = None, **more: float):
    entropy = torch.linspace(0.1, 1.0, inputs.logp.numel(), dtype=inputs.logp.dtype)
    options = {"entropy": entropy, "entropy_coefficient": 0.0, "ref_logp": ref} | more
    return add_terms(torch.zeros_like(inputs.logp), config, inputs, **options)


@pytest.mark.parametrize("kind", ["k1", "low_var", "k3"])
def test_unbiased_kl_equals_exact_kl_in_value_and_gradient(kind):
    """The mean over tokens of the old policy is a sum over the vocabulary with its probabilities."""
    logits, old, ref = distributions()
    logits.requires_grad_()
    old_logp, ref_logp = old.log_softmax(-1), ref.log_softmax(-1)
    config = AlgorithmConfig(kl=KLConfig(in_loss=0.7, loss_kind=kind, unbiased=True))
    logp = logits.log_softmax(-1)
    inputs = PolicyLossInputs(logp, torch.ones(30), old_logp=old_logp)
    loss, metrics = terms(config, inputs, ref_logp)
    expected = 0.7 * (logp.exp() * (logp - ref_logp)).sum()
    value = (old_logp.exp() * loss).sum()
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    ours, exact = (torch.autograd.grad(each, logits, retain_graph=True)[0] for each in (value, expected))
    torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-14)
    assert metrics["actor/kl_reference"].value == pytest.approx(loss.mean().item() / 0.7)
    # Without the ratio neither is exact.
    plain, _ = terms(AlgorithmConfig(kl=KLConfig(in_loss=0.7, loss_kind=kind)), inputs, ref_logp)
    assert not torch.allclose((old_logp.exp() * plain).sum(), expected, rtol=0.01)


@pytest.mark.parametrize(("anchor", "needs_old"), [("old", True), ("rollout", False)])
def test_drift_penalty_adds_squared_log_ratio(anchor, needs_old):
    policy, old, engine = distributions().log_softmax(-1)
    policy.requires_grad_()
    config = AlgorithmConfig(drift_penalty=DriftPenaltyConfig(0.3, anchor))
    assert terms_need_old_logp(config) is needs_old
    inputs = PolicyLossInputs(policy, torch.ones(30), old_logp=old, rollout_logp=engine)
    loss, metrics = terms(config, inputs)
    distance = policy - (old if anchor == "old" else engine)
    torch.testing.assert_close(loss, 0.3 * distance**2)
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), policy)[0], 0.6 * distance)
    assert metrics["actor/drift_squared"].value == pytest.approx(distance.square().mean().item())


def test_terms_are_added_and_off_by_default():
    policy, old, ref = distributions().log_softmax(-1)
    inputs = PolicyLossInputs(policy, torch.ones(30), old_logp=old, rollout_logp=old)
    assert terms(AlgorithmConfig(), inputs) == (pytest.approx(torch.zeros(30).tolist()), {})
    assert not terms_need_old_logp(AlgorithmConfig(kl=KLConfig(in_loss=0.1)))
    assert terms_need_old_logp(AlgorithmConfig(kl=KLConfig(in_loss=0.1, unbiased=True)))
    both = AlgorithmConfig(kl=KLConfig(in_loss=0.1), drift_penalty=DriftPenaltyConfig(0.3))
    kl, drift = (
        terms(AlgorithmConfig(kl=both.kl), inputs, ref)[0],
        terms(AlgorithmConfig(drift_penalty=both.drift_penalty), inputs)[0],
    )
    bonus = 0.2 * torch.linspace(0.1, 1.0, 30, dtype=torch.float64)
    torch.testing.assert_close(terms(both, inputs, ref, entropy_coefficient=0.2)[0], kl + drift - bonus)


def test_unbiased_kl_of_far_policies_is_finite():
    logp = torch.tensor([-1.0, -900.0], requires_grad=True)
    inputs = PolicyLossInputs(logp, torch.ones(2), old_logp=torch.tensor([-900.0, -1.0]))
    config = AlgorithmConfig(kl=KLConfig(in_loss=1.0, unbiased=True))
    loss, _ = add_terms(
        torch.zeros(2),
        config,
        inputs,
        entropy=torch.zeros(2),
        entropy_coefficient=0.0,
        ref_logp=torch.tensor([-5.0, -5.0]),
    )
    loss.sum().backward()
    assert loss.isfinite().all()
    assert logp.grad.isfinite().all()
