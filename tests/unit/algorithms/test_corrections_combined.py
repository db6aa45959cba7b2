"""Corrections of kind reject, and lists of corrections, compared with float64 loops over responses."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.algorithms.configured import configured_corrections, configured_loss
from mcore_rl.algorithms.corrections import Correction, corrected
from mcore_rl.algorithms.interface import PolicyLossInputs
from mcore_rl.algorithms.registry import policy_loss
from mcore_rl.config.algorithm import CorrectionConfig, ListedCorrectionConfig
from mcore_rl.config.load import as_yaml, load_config, load_text
from mcore_rl.config.rules.presets import PRESETS
from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError
from mcore_rl.types import Mean, merge_metrics

SHAPE = (6, 9)


def make(seed: int = 0) -> PolicyLossInputs:
    """Responses whose log-probabilities are between -3 and about 0; the last one has no trained tokens."""
    g = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(SHAPE, generator=g) * 3
    old = (rollout + 0.5 * torch.randn(SHAPE, generator=g)).clamp(max=-1e-4)
    mask = torch.rand(SHAPE, generator=g) < 0.7
    mask[-1] = False
    return PolicyLossInputs(
        logp=(old + 0.3 * torch.randn(SHAPE, generator=g)).clamp(max=-1e-4),
        mask=mask.float(),
        old_logp=old,
        advantages=torch.randn(SHAPE, generator=g),
        rollout_logp=rollout,
    )


def kept(inputs: PolicyLossInputs, config: CorrectionConfig) -> Tensor:
    """Return 1 for tokens that a correction of kind reject keeps, 0 for others, from loops in float64."""
    assert inputs.rollout_logp is not None
    assert inputs.advantages is not None
    trainer = inputs.logp if config.policy == "current" else inputs.old_logp
    assert trainer is not None
    low, high = config.bounds
    result = torch.zeros(SHAPE)
    for row in range(SHAPE[0]):
        tokens = [column for column in range(SHAPE[1]) if inputs.mask[row, column] > 0]
        pairs = [(float(trainer[row, t]), float(inputs.rollout_logp[row, t])) for t in tokens]
        advantages = [float(inputs.advantages[row, t]) for t in tokens]
        if config.measure in ("k2", "k3"):
            gaps = [ours - theirs for ours, theirs in pairs]
            values = [gap**2 / 2 if config.measure == "k2" else math.exp(gap) - 1 - gap for gap in gaps]
        elif config.measure == "ratio":
            values = [math.exp(ours - theirs) for ours, theirs in pairs]
        else:
            values = [larger_kl(math.exp(ours), math.exp(theirs)) for ours, theirs in pairs]
        if config.level == "token":
            units = [[value] for value in values]
        elif config.level == "any_token":
            units = [values] * len(tokens)
        elif config.measure != "ratio":
            units = [[math.fsum(values) / (max(len(tokens), 1) if config.level == "geometric" else 1)]] * len(tokens)
        else:
            total = math.fsum(ours - theirs for ours, theirs in pairs)
            units = [[math.exp(total / (max(len(tokens), 1) if config.level == "geometric" else 1))]] * len(tokens)
        for number, token in enumerate(tokens):
            deciding = advantages[number] if config.level == "token" else math.fsum(advantages)
            protected = config.negative_only and not deciding < 0
            result[row, token] = protected or all(low <= value <= high for value in units[number])
    return result


def larger_kl(p: float, q: float) -> float:
    def kl(a: float, b: float) -> float:
        return a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b))

    return max(kl(p, q), kl(q, p))


REJECTIONS: list[dict[str, Any]] = [
    {"level": "token", "high": 1.3},
    {"level": "token", "low": 0.5, "high": None},
    {"level": "sequence", "high": 3.0},
    {"level": "geometric", "low": 0.9, "high": 1.1},
    {"level": "any_token", "low": 0.3, "high": 2.0},
    {"level": "token", "measure": "bernoulli_kl", "high": 0.1},
    {"level": "any_token", "measure": "bernoulli_kl", "high": 0.3},
    {"level": "token", "measure": "k3", "high": 0.1},
    {"level": "any_token", "measure": "k2", "high": 0.5},
    {"level": "sequence", "measure": "k2", "high": 0.6},
    {"level": "geometric", "measure": "k3", "high": 0.12},
    {"level": "geometric", "low": math.exp(-0.05), "high": None, "negative_only": True, "policy": "current"},
    {"level": "token", "high": 1.2, "negative_only": True},
    {"level": "any_token", "high": 2.0, "negative_only": True},
]


@pytest.mark.parametrize("options", REJECTIONS, ids=str)
def test_rejection_keeps_the_same_tokens_as_loops(options: dict[str, Any]) -> None:
    config, inputs = CorrectionConfig("reject", **options), make(2)
    expected = kept(inputs, config)
    trained = inputs.mask > 0
    assert 0 < int(expected.sum()) < int(trained.sum()), "the example must keep some tokens and drop others"
    given = vars(inputs)
    result = Correction(config)(**{k: given[k] for k in ("logp", "mask", "old_logp", "rollout_logp", "advantages")})
    assert torch.equal(result.weights, expected)
    share = result.metrics["masked_fraction"]
    if config.level == "token":
        assert share == Mean(float((trained & (expected == 0)).sum()), float(trained.sum()))
    else:
        dropped = (trained & (expected == 0)).any(-1).sum()
        assert share == Mean(float(dropped), float(trained.any(-1).sum()))


@pytest.mark.parametrize("options", REJECTIONS, ids=str)
def test_rejection_ignores_tokens_outside_mask(options: dict[str, Any]) -> None:
    correction, inputs = Correction(CorrectionConfig("reject", **options)), make(2)
    names = ("logp", "old_logp", "rollout_logp", "advantages")
    clean = {name: getattr(inputs, name) for name in names}
    dirty = {name: tensor.masked_fill(inputs.mask == 0, math.nan) for name, tensor in clean.items()}
    assert torch.equal(correction(**dirty, mask=inputs.mask).weights, correction(**clean, mask=inputs.mask).weights)


def test_bernoulli_kl_is_finite_for_certain_tokens() -> None:
    """float32 gives a log-probability of 0 for a probability above 1 - 3e-8."""
    correction = Correction(CorrectionConfig("reject", measure="bernoulli_kl", high=2.0))
    trainer = torch.tensor([0.0, -1e-7, 0.0, -30.0, math.log(0.5)])
    engine = torch.tensor([0.0, 0.0, -1e-3, math.log(0.9), math.log(0.5)])
    result = correction(old_logp=trainer, rollout_logp=engine, mask=torch.ones(5))
    assert result.weights.tolist() == [1, 1, 1, 0, 1]
    assert all(math.isfinite(metric.value) for metric in result.metrics.values())


LISTED = [
    {"kind": "truncate", "high": 1.5},
    {"kind": "reject", "level": "geometric", "low": 0.9, "high": 1.1},
    {"kind": "reject", "level": "any_token", "low": 0.3, "high": 3.0},
    {"kind": "reject", "high": 1.01, "apply": False},
]


def test_factors_of_a_list_are_multiplied_and_gradients_follow() -> None:
    inputs = make(3)
    logp = inputs.logp.clone().requires_grad_()
    inputs = PolicyLossInputs(**{**vars(inputs), "logp": logp})
    loss = policy_loss("ppo_clip")
    corrections = [Correction(ListedCorrectionConfig(**entry)) for entry in LISTED]
    result = corrected(loss, corrections, inputs)
    assert inputs.old_logp is not None
    assert inputs.rollout_logp is not None
    weight = (inputs.old_logp.double() - inputs.rollout_logp.double()).exp().clamp(max=1.5)
    factors = inputs.mask * weight.float() * kept(inputs, corrections[1].config) * kept(inputs, corrections[2].config)
    plain = loss(inputs).loss
    torch.testing.assert_close(result.loss, plain * factors, rtol=1e-6, atol=0)
    (ours,) = torch.autograd.grad(result.loss.sum(), logp, retain_graph=True)
    (expected,) = torch.autograd.grad((plain * factors).sum(), logp)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
    trained = inputs.mask > 0
    dropped = float((trained & (factors == 0)).sum())
    assert result.metrics["correction/masked_fraction"] == Mean(dropped, float(trained.sum()))
    whole = factors[trained].double()
    kish = float(whole.sum() ** 2 / whole.square().sum() / len(whole))
    assert result.metrics["correction/effective_sample_fraction"].value == pytest.approx(kish, rel=1e-6)
    assert {"correction/0_truncated_fraction", "correction/1_masked_fraction", "correction/3_masked_fraction"} <= set(
        result.metrics
    )


def test_order_of_a_list_does_not_change_the_loss() -> None:
    inputs, loss = make(4), policy_loss("ppo_clip")
    corrections = [Correction(ListedCorrectionConfig(**entry)) for entry in LISTED[:3]]
    forward = corrected(loss, corrections, inputs).loss
    torch.testing.assert_close(corrected(loss, corrections[::-1], inputs).loss, forward, rtol=1e-6, atol=0)


def test_metrics_of_parts_sum_to_the_whole() -> None:
    inputs, loss = make(5), policy_loss("ppo_clip")
    corrections = [Correction(ListedCorrectionConfig(**entry)) for entry in LISTED]
    whole = corrected(loss, corrections, inputs).metrics
    parts = []
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        part = {name: tensor[rows] for name, tensor in vars(inputs).items() if tensor is not None}
        parts.append(corrected(loss, corrections, PolicyLossInputs(**part)).metrics)
    merged = merge_metrics(parts)
    for name, metric in whole.items():
        assert merged[name].value == pytest.approx(metric.value, rel=1e-6), name


def load(tmp_path: Path, *overrides: str) -> Config:
    path = tmp_path / "c.yaml"
    path.write_text("run: {dir: x}\nmodel: {hf_path: y}\n")
    return load_config(str(path), list(overrides), needs_data=False)


def test_list_replaces_the_automatic_correction(tmp_path: Path) -> None:
    listed = (
        "algorithm.corrections=[{kind: truncate, high: 3}, {kind: reject, level: geometric, low: 0.99, high: 1.01}]"
    )
    config = load(tmp_path, listed)
    config.rollout.quantization = "fp8"
    built = configured_corrections(config, configured_loss(config.algorithm))
    assert [(each.config.kind, each.config.level, each.config.bounds) for each in built] == [
        ("truncate", "token", (0.0, 3.0)),
        ("reject", "geometric", (0.99, 1.01)),
    ]


@pytest.mark.parametrize("name", PRESETS)
def test_preset_expands_to_values_that_can_be_configured(name: str, tmp_path: Path) -> None:
    preset = PRESETS[name]
    config = load(tmp_path, f"algorithm.correction_preset={name}")
    expected = [ListedCorrectionConfig(**entry) for entry in preset.corrections]
    algorithm = config.algorithm
    assert (algorithm.corrections, algorithm.old_logp) == (expected, preset.old_logp)
    assert algorithm.policy_loss.name == (preset.policy_loss or "ppo_clip")
    config.rollout.quantization = "fp8"
    built = configured_corrections(config, configured_loss(algorithm))
    assert [each.config for each in built] == expected, "the list is all there is, even where auto would add a weight"
    # The resolved configuration has the values instead of the name, so that it can be loaded again.
    assert "correction_preset: null" in as_yaml(config)
    assert load_text(as_yaml(config), needs_data=False).algorithm == algorithm


def test_preset_of_policy_gradient_weighs_the_current_policy(tmp_path: Path) -> None:
    """verl's bypass_pg_is: -sg[min(w, 2)] A log p, with w of the response between the policy now and the engine."""
    config, inputs = load(tmp_path, "algorithm.correction_preset=bypass_pg_is"), make(5)
    loss = configured_loss(config.algorithm)
    result = corrected(loss, configured_corrections(config, loss), inputs)
    assert inputs.rollout_logp is not None
    assert inputs.advantages is not None
    weights = (((inputs.logp - inputs.rollout_logp) * inputs.mask).double().sum(1, keepdim=True)).exp().clamp(max=2)
    expected = -weights * inputs.advantages * inputs.logp * inputs.mask
    torch.testing.assert_close(result.loss.double(), expected.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["algorithm.correction_preset=decoupled_k1_rs"],
            r"decoupled_k1_rs is not known; did you mean decoupled_k3_rs",
        ),
        (
            ["algorithm.correction_preset=decoupled_geo_rs", "algorithm.correction.high=3"],
            r"correction_preset=decoupled_geo_rs sets .*; remove algorithm\.correction, or the preset$",
        ),
        (
            ["algorithm.correction_preset=bypass_ppo_clip", "algorithm.corrections=[{kind: reject}]"],
            r"bypass_ppo_clip sets .*; remove algorithm\.corrections, or the preset$",
        ),
        (
            ["algorithm.correction_preset=pg_rs", "algorithm.policy_loss.name=gspo"],
            r"pg_rs sets algorithm\.policy_loss\.name=reinforce, but it is gspo; remove",
        ),
        (
            ["algorithm.policy_loss.name=ppo_clip", "algorithm.correction_preset=bypass_pg_is"],
            r"bypass_pg_is sets algorithm\.policy_loss\.name=reinforce, but it is ppo_clip; remove algorithm",
        ),
        (
            ["algorithm.policy_loss.clip_high=0.28", "algorithm.correction_preset=bypass_pg_is"],
            r"^algorithm\.policy_loss\.clip_high=0\.28 has no effect: .*bypass_pg_is .*; remove algorithm",
        ),
        *(
            (
                [run, "algorithm.correction_preset=decoupled_seq_is"],
                rf"^algorithm\.correction_preset=decoupled_seq_is .*, and {run} samples nothing; remove it",
            )
            for run in ("trainer.objective=sft", "trainer.objective=dpo", "algorithm.policy_loss.name=sft")
        ),
        (["algorithm.correction.measure=k3"], r"measure=k3 needs algorithm\.correction\.kind=reject"),
        (["algorithm.corrections=[{kind: none}]"], r"algorithm\.corrections.*kind=none must be one of truncate, mask"),
        (["algorithm.corrections=[{low: 3}]"], r"algorithm\.corrections: low=3 must be .* less than .*high=2"),
        (["algorithm.corrections=[{kind: mask}, {kind: truncate}]"], r"2 weights \(mask, truncate\).*reject"),
        (
            ["algorithm.corrections=[{kind: truncate}]", "algorithm.correction.kind=mask"],
            r"algorithm\.correction\.kind=mask has no effect with algorithm\.corrections",
        ),
        (["algorithm.correction.level=any_token"], r"level=any_token needs algorithm\.correction\.kind=reject"),
        (["algorithm.correction.negative_only=true"], r"negative_only=true needs algorithm\.correction\.kind=reject"),
        (
            ["algorithm.corrections=[{measure: second_moment}]"],
            r"measure=second_moment needs .*kind=reject, not truncate",
        ),
        (
            ["algorithm.corrections=[{kind: reject, measure: second_moment, high: null}]"],
            r"algorithm\.corrections: high=null: .*second_moment drops no token without a bound",
        ),
        (
            ["algorithm.corrections=[{kind: reject, measure: second_moment, level: sequence}]"],
            r"level=sequence: .*second_moment drops the tokens .*leave level at its default",
        ),
        (
            ["algorithm.corrections=[{kind: reject, measure: second_moment, low: 0.1}]"],
            r"low=0\.1: .*second_moment drops",
        ),
        (
            ["algorithm.corrections=[{kind: reject, measure: second_moment, negative_only: true}]"],
            r"negative_only=true: .*second_moment drops",
        ),
        (
            [
                "algorithm.corrections=[{kind: reject, measure: second_moment},{kind: reject, measure: second_moment}]",
            ],
            r"contains 2 entries with measure second_moment; keep the one with the smallest high",
        ),
        (
            ["algorithm.corrections=[{measure: bernoulli_kl}]"],
            r"measure=bernoulli_kl needs .*kind=reject, not truncate",
        ),
        (
            ["algorithm.corrections=[{kind: reject, measure: bernoulli_kl, level: sequence}]"],
            r"level=sequence: .*bernoulli_kl is a quantity of single tokens",
        ),
        (
            ["algorithm.old_logp=rollout", "algorithm.correction.kind=truncate"],
            r"algorithm\.correction\.kind=truncate, policy=old: with algorithm\.old_logp=rollout",
        ),
        (
            ["algorithm.old_logp=rollout", "algorithm.corrections=[{kind: reject}]"],
            r"algorithm\.corrections: kind=reject, policy=old: with algorithm\.old_logp=rollout",
        ),
    ],
)
def test_invalid_corrections_name_the_key(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, *overrides)


def test_list_is_rejected_for_a_loss_without_corrections(tmp_path: Path) -> None:
    config = load(tmp_path, "algorithm.corrections=[{kind: reject}]", "algorithm.policy_loss.name=decoupled_ppo")
    with pytest.raises(
        ConfigError, match=r"algorithm\.corrections: algorithm\.policy_loss\.name=decoupled_ppo does not"
    ):
        configured_loss(config.algorithm)


@pytest.mark.parametrize(
    ("options", "missing"), [({"policy": "current"}, "logp"), ({"negative_only": True}, "advantages")]
)
def test_correction_without_its_inputs_names_them(options: dict[str, Any], missing: str) -> None:
    ones = torch.ones(2, 2)
    with pytest.raises(ValueError, match=f"a correction needs {missing}"):
        Correction(CorrectionConfig("reject", **options))(old_logp=ones, rollout_logp=ones, mask=ones)


@pytest.mark.parametrize("policy", ["current", "old"])
@pytest.mark.parametrize("high", [0.02, 0.1, 5.0])
def test_second_moment_drops_the_fewest_tokens(policy: str, high: float) -> None:
    """arXiv 2510.01161: drop the token with the largest squared log ratio until the mean of the others is small."""
    inputs = make(3)
    trainer = inputs.logp if policy == "current" else inputs.old_logp
    assert trainer is not None
    assert inputs.rollout_logp is not None
    squared = (trainer - inputs.rollout_logp).square().double()
    remaining = [(i, t) for i, t in inputs.mask.nonzero().tolist()]
    count = len(remaining)
    while remaining and sum(float(squared[token]) for token in remaining) / len(remaining) > high:
        remaining.remove(max(remaining, key=lambda token: float(squared[token])))
    assert high == 5.0 or 0 < len(remaining) < count
    expected = torch.zeros(SHAPE)
    for token in remaining:
        expected[token] = 1.0
    correction = Correction(CorrectionConfig("reject", measure="second_moment", high=high, policy=policy))
    found = corrected(policy_loss("reinforce"), [correction], inputs)
    plain = policy_loss("reinforce")(inputs)
    assert torch.equal(found.loss, plain.loss * expected)
    assert found.metrics["correction/masked_fraction"] == Mean(count - len(remaining), count)


def test_second_moment_uses_the_choice_of_the_update() -> None:
    """The kept tokens of a micro-batch follow from all micro-batches, as in the objective."""
    inputs = make(3)
    correction = Correction(CorrectionConfig("reject", measure="second_moment", high=0.1, policy="current"))
    given = {name: getattr(inputs, name) for name in ("rollout_logp", "mask", "old_logp", "logp", "advantages")}
    whole = correction(**given).weights
    within = whole > 0
    rows = [correction(**{name: tensor[i : i + 1] for name, tensor in given.items()}) for i in range(SHAPE[0])]
    assert not torch.equal(torch.cat([row.weights for row in rows]), whole)
    rows = [
        correction(**{name: tensor[i : i + 1] for name, tensor in given.items()}, within=within[i : i + 1])
        for i in range(SHAPE[0])
    ]
    assert torch.equal(torch.cat([row.weights for row in rows]), whole)


def test_other_corrections_ignore_the_choice_of_the_update() -> None:
    inputs = make(3)
    ratio = Correction(ListedCorrectionConfig("reject", high=1.5))
    moment = Correction(ListedCorrectionConfig("reject", measure="second_moment", high=0.1, policy="current"))
    nothing = replace(inputs, within=torch.zeros(SHAPE, dtype=torch.bool))
    alone = corrected(policy_loss("reinforce"), [ratio], inputs)
    assert alone.loss.any()
    assert torch.equal(corrected(policy_loss("reinforce"), [ratio], nothing).loss, alone.loss)
    assert not corrected(policy_loss("reinforce"), [ratio, moment], nothing).loss.any()
