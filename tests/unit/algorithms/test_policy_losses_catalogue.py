"""Every policy loss compared with the formula of its paper (loss_oracles.py), and properties common to all losses."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, settings
from hypothesis import given as given_by
from hypothesis import strategies as st

from mcore_rl.algorithms import compute_policy_loss, policy_loss
from mcore_rl.algorithms.registry import POLICY_LOSSES
from mcore_rl.types import Max, Mean, Min, merge_metrics
from tests.unit.algorithms import loss_oracles
from tests.unit.algorithms.loss_oracles import loss_and_gradient

CASES = [
    ("ppo_clip", {}),
    ("ppo_clip", {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.5}),
    ("reinforce", {}),
    ("cispo", {}),
    ("cispo", {"clip_low": 0.2, "clip_high": 0.3}),
    ("gspo", {}),
    ("gspo", {"clip_low": 0.03, "clip_high": 0.08}),
    ("gmpo", {}),
    ("gmpo", {"clip_low": 0.1, "clip_high": 0.3}),
    ("clip_cov", {"cov_ratio": 1.0, "cov_low": 0.1, "cov_high": 0.4}),
    ("clip_cov", {"cov_ratio": 1.0, "clip_low": 0.1, "clip_high": 0.5}),
    ("kl_cov", {}),
    ("kl_cov", {"cov_ratio": 0.2, "kl_coef": 0.7}),
    ("cispo", {"anchor": "rollout", "clip_low": 0.2, "clip_high": 0.3}),
    ("sapo", {}),
    ("sapo", {"tau_pos": 0.5, "tau_neg": 3.0}),
    ("dppo_tv", {}),
    ("dppo_tv", {"clip_low": 0.02, "clip_high": 0.05, "ratio_cap": 1.3}),
    ("dppo_tv", {"anchor": "old"}),
    ("dppo_kl", {}),
    ("dppo_kl", {"clip_low": 0.005, "clip_high": 0.01, "ratio_cap": 1.3}),
    ("dppo_kl", {"anchor": "old"}),
    ("dppo_tv", {"clip_low": 0.02, "clip_high": 0.05, "mask_anchor": "old"}),
    ("dppo_kl", {"clip_low": 0.005, "clip_high": 0.01, "anchor": "old", "mask_anchor": "rollout"}),
    ("vespo", {}),
    ("vespo", {"k_pos": 1.0, "lambda_pos": 0.3, "k_neg": 0.7, "lambda_neg": 1.5, "anchor": "old"}),
    ("dro", {}),
    ("dro", {"beta": 2.0, "anchor": "old"}),
    ("fipo", {}),
    ("fipo", {"decay_tokens": 2.0, "influence_low": 0.4, "influence_high": 0.7, "safety_ratio": 1.2, "dual_clip": 1.6}),
    ("real", {}),
    ("real", {"tau": 0.2}),
    ("decoupled_ppo", {}),
    ("decoupled_ppo", {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.4}),
    ("decoupled_ppo", {"prox": "loglinear"}),
    ("decoupled_ppo", {"prox": "metrics", "dual_clip": 1.4}),
]
RATIO_LOSSES = [name for name in POLICY_LOSSES if name not in {"sft", "reinforce"}]


def make(seed=0, shape=(5, 9), spread=0.5, dtype=torch.float64, mask=None):
    g = torch.Generator().manual_seed(seed)

    def normal(scale=1.0):
        return scale * torch.randn(shape, generator=g, dtype=torch.float64)

    old = -torch.rand(shape, generator=g, dtype=torch.float64) * 3
    if mask is None:
        mask = torch.rand(shape, generator=g) < 0.7
        mask[-1] = False  # a response without a trained token
        mask[-2] = torch.arange(shape[1]) == 2  # and a response with one trained token
    given = {
        "logp": old + normal(spread) + 0.3 * torch.randn(shape[0], 1, generator=g, dtype=torch.float64),
        "old_logp": old,
        "advantages": normal(),
        "rollout_logp": old + normal(0.2),
        "prox_logp": old + normal(0.1),
        "staleness": torch.randint(0, 4, shape, generator=g).double(),
        "mask": mask.double(),
    }
    return {name: tensor.to(dtype) for name, tensor in given.items()}


def evaluate(name, given, options, upstream):
    logp = given["logp"].clone().requires_grad_()
    result = compute_policy_loss(name, **{**given, "logp": logp}, **options)
    (result.loss * upstream).sum().backward()
    return result, logp.grad


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_loss_values_and_gradients_match_paper(name, options, dtype, tolerance):
    given = make(dtype=dtype)
    upstream = torch.rand(given["logp"].shape, generator=torch.Generator().manual_seed(1)).to(dtype) + 0.5
    result, gradient = evaluate(name, given, options, upstream)
    values, expected = loss_and_gradient(name, given, options, upstream)
    torch.testing.assert_close(result.loss.double(), values, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradient.double(), expected, rtol=tolerance, atol=tolerance)
    assert result.loss.dtype == dtype


@settings(max_examples=100, deadline=None)
@given_by(st.data())
def test_loss_gradients_with_random_masks_match_paper(data):
    shape = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 5)))
    bits = data.draw(st.lists(st.booleans(), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
    name, options = data.draw(st.sampled_from(CASES))
    mask = torch.tensor(bits).view(shape)
    assume(name != "kl_cov" or sum(bits) != 2)  # two covariances are always equal, and all ties are chosen
    given = make(data.draw(st.integers(0, 99)), shape, spread=data.draw(st.sampled_from([0.0, 0.1, 1.5])), mask=mask)
    ones = torch.ones(shape, dtype=torch.float64)
    result, gradient = evaluate(name, given, options, ones)
    if not mask.any():
        values = expected = torch.zeros_like(ones)
    else:
        values, expected = loss_and_gradient(name, given, options, ones)
    torch.testing.assert_close(result.loss.detach(), values, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_loss_ignores_tokens_outside_mask(name):
    given = make(2)
    outside = given["mask"] == 0
    ones = torch.ones_like(given["logp"])
    clean, clean_gradient = evaluate(name, given, {}, ones)
    junk = dict(zip(given, (math.nan, -math.inf, math.inf, math.nan, math.inf, math.nan), strict=False))
    dirty_given = {key: tensor.masked_fill(outside, junk.get(key, 0.0)) for key, tensor in given.items()}
    dirty, gradient = evaluate(name, dirty_given, {}, ones)
    assert torch.equal(dirty.loss, clean.loss)
    assert torch.equal(gradient, clean_gradient)
    assert dirty.metrics == clean.metrics
    assert not dirty.loss[outside].any()
    assert not gradient[outside].any()


@pytest.mark.parametrize("name", RATIO_LOSSES)
def test_loss_with_extreme_log_ratios_is_finite(name):
    given = {key: tensor.float() for key, tensor in make(4).items()}
    given["advantages"][:, 3] = 0.0
    for difference in (1e4, -1e4):
        given["logp"] = given["old_logp"] + difference * (torch.arange(9) % 2)
        result, gradient = evaluate(name, given, {}, torch.ones_like(given["logp"]))
        assert result.loss.isfinite().all()
        assert gradient.isfinite().all()
        assert all(math.isfinite(metric.value) for metric in result.metrics.values())


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_loss_without_tokens_is_zero_with_empty_sums(name):
    for shape in ((0, 4), (2, 0)):
        given = {key: torch.zeros(shape) for key in make()}
        result = compute_policy_loss(name, **given)
        assert result.loss.shape == shape
        assert all(metric.count == 0 for metric in result.metrics.values())


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_loss_gradient_reaches_policy_only(name):
    given = {key: tensor.clone().requires_grad_(key != "mask") for key, tensor in make(5).items()}
    compute_policy_loss(name, **given).loss.sum().backward()
    assert given["logp"].grad is not None
    assert all(tensor.grad is None for key, tensor in given.items() if key != "logp")


@pytest.mark.parametrize("name", [name for name in RATIO_LOSSES if not policy_loss(name).needs.whole_group])
def test_loss_at_equal_policies_has_policy_gradient(name):
    """If policy, old policy and engine are equal, the gradient is -A (per token; for gmpo the mean over a row)."""
    given = make(6)
    given["advantages"] = given["advantages"][:, :1].expand(5, 9).contiguous()
    for other in ("old_logp", "rollout_logp", "prox_logp"):
        given[other] = given["logp"]
    options = {"cov_low": 1e6, "cov_high": 1e7} if name == "clip_cov" else {}
    _, gradient = evaluate(name, given, options, torch.ones_like(given["logp"]))
    torch.testing.assert_close(gradient, -given["advantages"] * given["mask"])


@pytest.mark.parametrize("name", [name for name in RATIO_LOSSES if name not in {"clip_cov", "kl_cov", "real"}])
def test_loss_metrics_of_parts_sum_to_whole(name):
    given = make(7)
    whole = compute_policy_loss(name, **given).metrics
    parts = [
        compute_policy_loss(name, **{key: tensor[rows] for key, tensor in given.items()}).metrics
        for rows in (slice(0, 2), slice(2, 4), slice(4, 5))
    ]
    merged = merge_metrics(parts)
    assert merged.keys() == whole.keys()
    for key, metric in whole.items():
        assert merged[key].value == pytest.approx(metric.value, rel=1e-12), key


OLD = {"decoupled_ppo": "prox_logp", "dppo_tv": "rollout_logp", "dppo_kl": "rollout_logp", "dro": "rollout_logp"}
"""Denominator of the ratio, if it is not the old policy."""


@pytest.mark.parametrize("name", ["ppo_clip", "gmpo", "cispo", "kl_cov", "sapo", "fipo", *OLD])
def test_ratio_metrics_equal_means_over_trained_tokens(name):
    given = make(8)
    options = {} if name in ("kl_cov", "sapo", "dro") else {"clip_low": 0.3}
    metrics = compute_policy_loss(name, **given, **options).metrics
    old = given[OLD.get(name, "old_logp")]
    d = (given["logp"] - old)[given["mask"] > 0].tolist()
    count = len(d)
    assert metrics["ppo_kl"] == Mean(pytest.approx(-sum(d)), count)
    assert metrics["ppo_kl_low_var"].value == pytest.approx(sum(math.exp(x) - 1 - x for x in d) / count)
    assert metrics["ratio_mean"].value == pytest.approx(sum(map(math.exp, d)) / count)
    assert metrics["ratio_max"] == Max(pytest.approx(math.exp(max(d))))
    assert metrics["ratio_min"] == Min(pytest.approx(math.exp(min(d))))


def test_clip_fractions_distinguish_bounds():
    ratios = torch.tensor([[1.5, 1.5, 1.5, 0.5, 0.5, 1.0, 1.5]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, 1.0, -1.0, 1.0, -1.0, 1.0, 0.0]])
    one, zero = torch.ones(1, 7), torch.zeros_like(ratios)
    given = {"logp": ratios.log(), "old_logp": zero, "rollout_logp": zero, "advantages": advantages, "mask": one}
    bounds = {"clip_low": 0.2, "clip_high": 0.2}
    for name in ("ppo_clip", "decoupled_ppo", "clip_cov", "gmpo"):
        metrics = compute_policy_loss(name, **given, **bounds).metrics
        assert metrics["clip_fraction"] == Mean(3.0, 7.0)
        assert metrics["clip_fraction_high"] == Mean(2.0, 7.0)
        assert metrics["clip_fraction_low"] == Mean(1.0, 7.0)
    cispo = compute_policy_loss("cispo", **given, **bounds).metrics
    assert (cispo["clip_fraction_low"], cispo["clip_fraction_high"]) == (Mean(2.0, 7.0), Mean(4.0, 7.0))


def test_ratio_extremes_cover_trained_tokens_only():
    mask = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    for ratios, low, high in (([1.2, 1.4, 9.0], 1.2, 1.4), ([0.7, 0.8, 0.1], 0.7, 0.8)):
        logp = torch.tensor([ratios, [1.0] * 3]).log()
        for name in ("ppo_clip", "gspo"):
            metrics = compute_policy_loss(name, logp=logp, old_logp=0 * logp, advantages=logp, mask=mask).metrics
            mean = math.sqrt(ratios[0] * ratios[1])
            expected = (mean, mean) if name == "gspo" else (low, high)
            assert (metrics["ratio_min"].value, metrics["ratio_max"].value) == pytest.approx(expected)


def test_ppo_kl_of_nearly_equal_policies_is_accurate():
    old = torch.full((1, 1000), -1.0)
    d = 183 * 2.0**-24  # d^2 / 2 is below the resolution of float32 relative to 1
    metrics = compute_policy_loss("ppo_clip", logp=old + d, old_logp=old, advantages=old, mask=-old).metrics
    assert metrics["ppo_kl_low_var"].value == pytest.approx(d * d / 2, rel=1e-4, abs=0)


def test_gspo_metrics_count_responses():
    logp = torch.zeros(4, 10)
    logp[0], logp[1, :1] = 0.5, -0.5
    mask = torch.ones(4, 10)
    mask[1, 1:], mask[2, 3:], mask[3] = 0.0, 0.0, 0.0
    advantages = torch.tensor([[1.0], [-1.0], [1.0], [1.0]]).expand(4, 10)
    zero = torch.zeros_like(logp)
    metrics = compute_policy_loss("gspo", logp=logp, old_logp=zero, advantages=advantages, mask=mask).metrics
    assert metrics["clip_fraction_high"] == Mean(1.0, 3.0)
    assert metrics["clip_fraction_low"] == Mean(1.0, 3.0)
    assert metrics["clip_fraction"] == Mean(2.0, 3.0)
    assert metrics["ratio_max"].value == pytest.approx(math.exp(0.5))
    assert metrics["ratio_min"].value == pytest.approx(math.exp(-0.5))
    assert metrics["ratio_mean"].value == pytest.approx((math.exp(0.5) + math.exp(-0.5) + 1) / 3)
    assert metrics["ppo_kl"].count == 14


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "gmpo", "clip_cov", "decoupled_ppo"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_loss_with_far_ratio_has_gradient_of_bounded_ratio(name, dtype):
    for drift in (-500.0, -30.0, -20.5, -19.5, 19.5, 20.5, 30.0, 500.0):
        check_gradient_of_far_ratio(name, drift, dtype)


def check_gradient_of_far_ratio(name, drift, dtype):
    """The reference is autograd of max(-A r, -A clip(r)) in float64, with r = exp(clamp(log ratio, -20, 20))."""
    advantages = torch.tensor([[2.0, 2.0], [-1.5, -1.5]], dtype=dtype)
    zero = torch.zeros(2, 2, dtype=dtype)
    given = {"old_logp": zero, "rollout_logp": zero, "logp": zero + drift, "advantages": advantages}
    given |= {"mask": torch.ones(2, 2, dtype=dtype)}
    if name != "decoupled_ppo":
        del given["rollout_logp"]
    options = {} if name == "gmpo" else {"clip_low": 0.1, "clip_high": 0.2}
    _, gradient = evaluate(name, given, options, torch.ones(2, 2, dtype=dtype))
    logp = given["logp"].double().requires_grad_()
    ratio = logp.clamp(-20, 20).exp()
    low, high = (math.exp(-0.4), math.exp(0.4)) if name == "gmpo" else (0.9, 1.2)
    scaled = -advantages.double()
    torch.max(scaled * ratio, scaled * ratio.clamp(low, high)).sum().backward()
    torch.testing.assert_close(gradient.double(), logp.grad, rtol=1e-5, atol=1e-30)
    assert abs(drift) < 20 or not gradient.any()


def test_decoupled_ppo_prox_defaults_to_old_logp():
    given = make(9)
    given["old_logp"] = torch.full_like(given["logp"], math.nan)
    result = compute_policy_loss("decoupled_ppo", **given)
    weights = (given["prox_logp"] - given["rollout_logp"]).exp()[given["mask"] > 0]
    assert result.metrics["behave_weight"].value == pytest.approx(weights.mean().item())
    given["old_logp"] = given.pop("prox_logp")
    assert torch.equal(compute_policy_loss("decoupled_ppo", **given).loss, result.loss)


def test_decoupled_ppo_reports_interpolation_error():
    given = make(9)
    metrics = compute_policy_loss("decoupled_ppo", **given, prox="metrics").metrics
    errors, weights = [], []
    for i, t in loss_oracles.tokens(given["mask"].tolist()):
        logp, behave, prox, stale = (
            given[name][i, t].item() for name in ("logp", "rollout_logp", "prox_logp", "staleness")
        )
        guess = behave + max(0.0, (stale - 1) / max(stale, 1)) * (logp - behave)
        errors.append(abs(guess - prox))
        weights.append(abs(math.exp(guess - behave) - math.exp(prox - behave)))
    assert metrics["prox_error"].value == pytest.approx(sum(errors) / len(errors))
    assert metrics["prox_weight_error"].value == pytest.approx(sum(weights) / len(weights))


def test_decoupled_ppo_needs_follow_options():
    assert policy_loss("decoupled_ppo").needs.old_logp
    assert not policy_loss("decoupled_ppo").needs.staleness
    loglinear = policy_loss("decoupled_ppo", prox="loglinear").needs
    assert loglinear.staleness
    assert not loglinear.old_logp  # the forward pass that it saves
    with pytest.raises(ValueError, match="decoupled_ppo needs staleness"):
        compute_policy_loss("decoupled_ppo", **{**make(), "staleness": None}, prox="loglinear")
    whole = [name for name in POLICY_LOSSES if policy_loss(name).needs.whole_sequence]
    assert whole == ["gspo", "gmpo", "vespo", "fipo"]
    assert [name for name in POLICY_LOSSES if policy_loss(name).needs.selection] == ["clip_cov", "kl_cov"]
    assert [name for name in POLICY_LOSSES if policy_loss(name).needs.whole_group] == ["real"]
    rollout = [name for name in POLICY_LOSSES if policy_loss(name).needs.rollout_logp]
    assert rollout == ["dppo_tv", "dppo_kl", "vespo", "dro", "decoupled_ppo"]
    for name in ("cispo", *rollout[:-1]):
        needs = [policy_loss(name, anchor=anchor).needs for anchor in ("old", "rollout")]
        assert [(need.old_logp, need.rollout_logp) for need in needs] == [(True, False), (False, True)]
    both = policy_loss("dppo_tv", mask_anchor="old").needs
    assert both.old_logp
    assert both.rollout_logp
    with pytest.raises(ValueError, match=r"gspo takes one response per row"):
        compute_policy_loss("gspo", **{key: tensor.flatten() for key, tensor in make().items()})


OF_TOKENS = [
    name
    for name in POLICY_LOSSES
    if not (policy_loss(name).needs.whole_sequence or policy_loss(name).needs.whole_group)
]


@pytest.mark.parametrize("name", OF_TOKENS)
def test_loss_of_packed_tokens_equals_rows(name):
    given = make(10)
    rows = compute_policy_loss(name, **given)
    flat = compute_policy_loss(name, **{key: tensor.flatten() for key, tensor in given.items()})
    assert torch.equal(flat.loss.view(rows.loss.shape), rows.loss)
    assert flat.metrics == rows.metrics
