"""KL estimators compared with exact arithmetic and with the exact divergence of a distribution."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from mcore_rl.algorithms import kl_penalty
from mcore_rl.errors import ConfigError


def exact_low_var(d: float) -> float:
    """Compute exp(d) - 1 - d by its series in rational arithmetic."""
    x, term, total = Fraction(d), Fraction(1), Fraction(0)
    for n in range(1, 60):
        term = term * x / n
        total += term if n > 1 else 0
    return float(total)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 4e-6), (torch.float64, 1e-14)])
def test_low_var_near_zero_is_accurate(dtype, tolerance):
    for d in (1e-6, -1e-5, 3e-4, -0.02, 0.0999, -0.1001, 0.11, 0.5, -1.0, 3.0):
        ref = torch.tensor([[d]], dtype=dtype)
        got = kl_penalty(torch.zeros_like(ref), ref, "low_var").item()
        assert got == pytest.approx(exact_low_var(ref.item()), rel=tolerance)


def test_kl_penalty_of_other_kinds_matches_formulas():
    logp, ref = torch.tensor([[-1.0, -2.5]]), torch.tensor([[-1.5, -2.0]])
    assert kl_penalty(logp, ref, "k1").tolist() == [[0.5, -0.5]]
    assert kl_penalty(logp, ref, "abs").tolist() == [[0.5, 0.5]]
    assert kl_penalty(logp, ref, "mse").tolist() == [[0.125, 0.125]]
    assert torch.equal(kl_penalty(logp, ref, "k2"), kl_penalty(logp, ref, "mse"))
    assert torch.equal(kl_penalty(logp, ref, "k3"), kl_penalty(logp, ref, "low_var"))


def test_k1_and_low_var_are_unbiased_and_low_var_is_never_negative():
    g = torch.Generator().manual_seed(0)
    policy, reference = torch.randn(2, 50, generator=g, dtype=torch.float64).log_softmax(-1)
    exact = torch.nn.functional.kl_div(reference, policy, log_target=True, reduction="sum")
    for kind in ("k1", "low_var"):
        per_token = kl_penalty(policy, reference, kind)
        torch.testing.assert_close((policy.exp() * per_token).sum(), exact, rtol=1e-12, atol=0)
    assert (kl_penalty(policy, reference, "low_var") >= 0).all()


@pytest.mark.parametrize("kind", ["k1", "abs", "mse", "low_var"])
def test_kl_penalty_gradient_matches_finite_differences(kind):
    d = torch.tensor([[-2.0, -0.3, -0.04, 0.03, 0.2, 1.5]], dtype=torch.float64)
    logp = (-d).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: kl_penalty(x, torch.zeros_like(d), kind), logp)


def test_low_var_of_extreme_differences_is_finite():
    logp = torch.tensor([[-500.0, 0.0]], requires_grad=True)
    kl_penalty(logp, torch.tensor([[0.0, -500.0]]), "low_var").sum().backward()
    assert logp.grad.isfinite().all()
    assert logp.grad[0, 0] < 0 < logp.grad[0, 1]


def test_kl_penalty_of_equal_policies_is_exactly_zero():
    logp = torch.tensor([[-0.3, -7.0]])
    for kind in ("k1", "abs", "mse", "low_var"):
        assert kl_penalty(logp, logp, kind).abs().sum() == 0


def test_kl_penalty_of_unknown_kind_lists_known_kinds():
    assert math.isfinite(kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), "k3").item())
    with pytest.raises(ConfigError, match="k1, abs, mse, low_var"):
        kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), "k4")
