"""Importance corrections compared with float64 loops over responses."""

from __future__ import annotations

import math

import pytest
import torch

from mcore_rl.algorithms import Correction
from mcore_rl.algorithms.corrections import DIVERGENCES
from mcore_rl.config import load_config
from mcore_rl.config.algorithm import CorrectionConfig
from mcore_rl.errors import ConfigError
from mcore_rl.types import EffectiveFraction, Mean, merge_metrics


def correction(*section, **keys):
    return Correction(CorrectionConfig(*section, **keys))


def make(seed=0, spread=0.4, shape=(5, 8)):
    g = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(shape, generator=g) * 3
    mask = torch.rand(shape, generator=g) < 0.7
    mask[-1] = False
    return {
        "old_logp": rollout + spread * torch.randn(shape, generator=g),
        "rollout_logp": rollout,
        "mask": mask.float(),
    }


def by_hand(given, kind, level, low, high):
    """Return the weight per token, and raw and applied weights per token or response."""
    rows = [
        [(a - b) if m else None for a, b, m in zip(*row, strict=True)]
        for row in zip(*(given[name].double().tolist() for name in ("old_logp", "rollout_logp", "mask")), strict=True)
    ]

    def bounded(weight):
        if kind == "truncate":
            return min(max(weight, low), high)
        return weight if low <= weight <= high else 0.0

    spread, raw = [], []
    for row in rows:
        trained = [d for d in row if d is not None]
        total = math.exp(sum(trained) / (len(trained) if level == "geometric" and trained else 1))
        weights = [None if d is None else (math.exp(d) if level == "token" else total) for d in row]
        spread.append([0.0 if w is None else bounded(w) for w in weights])
        if level == "token":
            raw += [w for w in weights if w is not None]
        elif trained:
            raw.append(total)
    return torch.tensor(spread), raw, [bounded(w) for w in raw]


LEVELS = ("token", "sequence", "geometric")


@pytest.mark.parametrize("kind", ["truncate", "mask"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("low", "high"), [(None, 1.2), (0.9, 1.5), (0.0, 2.0)])
def test_correction_matches_loops(kind, level, low, high):
    given = make()
    given["old_logp"].requires_grad_()
    result = correction(kind, level, low, high)(**given)
    low = low if low is not None else (0.0 if kind == "truncate" else 1 / high)
    weights, raw, applied = by_hand(given, kind, level, low, high)
    torch.testing.assert_close(result.weights, weights, rtol=1e-5, atol=1e-6)
    assert result.weights.dtype == torch.float32
    assert not result.weights.requires_grad
    metrics = result.metrics
    outside = sum(not low <= w <= high for w in raw)
    share = "truncated_fraction" if kind == "truncate" else "masked_fraction"
    assert metrics.keys() == {"weight_mean", "weight_max", "effective_sample_fraction", share, *DIVERGENCES}
    assert metrics[share] == Mean(outside, len(raw))
    assert metrics["weight_mean"].value == pytest.approx(sum(raw) / len(raw), rel=1e-5)
    assert metrics["weight_max"].value == pytest.approx(max(raw), rel=1e-5)
    kish = sum(applied) ** 2 / sum(w * w for w in applied) / len(applied) if any(applied) else 0.0
    assert metrics["effective_sample_fraction"].value == pytest.approx(kish, rel=1e-5)
    gaps = (given["old_logp"] - given["rollout_logp"]).double()[(given["mask"] > 0) & (weights > 0)].tolist()
    expected = {
        "kl": [-gap for gap in gaps],
        "kl_low_var": [math.exp(gap) - 1 - gap for gap in gaps],
        "kl_reverse": [math.exp(gap) * gap for gap in gaps],
        "kl_reverse_low_var": [math.exp(gap) * (math.exp(-gap) - 1 + gap) for gap in gaps],
    }
    for name, values in expected.items():
        assert metrics[name].value == pytest.approx(sum(values) / (len(values) or 1), rel=1e-5, abs=1e-7), name


@pytest.mark.parametrize("level", LEVELS)
def test_correction_metrics_of_parts_sum_to_whole(level):
    given = make(1)
    whole = correction("truncate", level)(**given).metrics
    parts = [
        correction("truncate", level)(**{name: tensor[rows] for name, tensor in given.items()}).metrics
        for rows in (slice(0, 1), slice(1, 4), slice(4, 5))
    ]
    merged = merge_metrics(parts)
    for name, metric in whole.items():
        assert merged[name].value == pytest.approx(metric.value, rel=1e-12), name


@pytest.mark.parametrize("level", LEVELS)
def test_correction_ignores_tokens_outside_mask(level):
    given = make(3)
    outside = given["mask"] == 0
    clean = correction("truncate", level)(**given)
    given["old_logp"] = given["old_logp"].masked_fill(outside, math.nan)
    given["rollout_logp"] = given["rollout_logp"].masked_fill(outside, -math.inf)
    dirty = correction("truncate", level)(**given)
    assert torch.equal(dirty.weights, clean.weights)
    assert dirty.metrics == clean.metrics


@pytest.mark.parametrize("kind", ["truncate", "mask"])
@pytest.mark.parametrize("level", LEVELS)
def test_correction_with_extreme_differences_stays_bounded(kind, level):
    given = {
        "old_logp": torch.tensor([[0.0, 0.0], [-900.0, 0.0]]),
        "rollout_logp": torch.tensor([[-900.0, 0.0], [0, 0]]),
    }
    result = correction(kind, level, low=0.1, high=2.0)(**given, mask=torch.ones(2, 2))
    assert result.weights.isfinite().all()
    assert result.weights[0, 0] == (2.0 if kind == "truncate" else 0.0)
    assert result.weights[1, 0] == pytest.approx(0.1 if kind == "truncate" else 0.0)
    assert all(math.isfinite(metric.value) for metric in result.metrics.values())


def test_correction_above_token_level_needs_rows():
    given = make(5)
    flat = {name: tensor.flatten() for name, tensor in given.items()}
    rows = correction("mask")(**given)
    assert torch.equal(correction("mask")(**flat).weights.view(5, 8), rows.weights)
    assert not correction("mask").needs_whole_sequence
    for level in ("sequence", "geometric"):
        assert correction("mask", level).needs_whole_sequence
        with pytest.raises(ValueError, match="one response per row"):
            correction("mask", level)(**flat)
    with pytest.raises(ValueError, match=r"rollout_logp \[5, 1\] must have the shape of old_logp, \[5, 8\]"):
        correction("mask")(**{**given, "rollout_logp": given["rollout_logp"][:, :1]})


def test_correction_without_tokens_gives_empty_sums():
    empty = torch.zeros(0, 3)
    for level in LEVELS:
        result = correction("truncate", level)(old_logp=empty, rollout_logp=empty, mask=empty)
        assert result.weights.shape == (0, 3)
        assert result.metrics["effective_sample_fraction"] == EffectiveFraction(0.0, 0.0, 0.0)
        assert result.metrics["effective_sample_fraction"].value == 0.0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"kind": "clip"}, r"algorithm\.correction\.kind=clip must be one of auto, none, truncate, mask"),
        ({"level": "batch"}, r"algorithm\.correction\.level=batch .*token, sequence, geometric"),
        ({"kind": "mask", "high": 0.0}, r"algorithm\.correction\.high=0\.0"),
        ({"kind": "mask", "high": 0.5}, r"algorithm\.correction\.low=2 .*less than algorithm\.correction\.high=0\.5"),
        ({"kind": "truncate", "low": 2.0}, r"algorithm\.correction\.low=2"),
        ({"kind": "truncate", "low": -0.1}, r"algorithm\.correction\.low=-0\.1"),
    ],
)
def test_correction_with_invalid_option_names_key(tmp_path, overrides, message):
    with pytest.raises(ConfigError, match=message):
        correction(**{"kind": "truncate", **overrides})
    config = tmp_path / "c.yaml"
    config.write_text("run: {dir: x}\nmodel: {hf_path: y}\n")
    with pytest.raises(ConfigError, match=message):
        load_config(
            str(config), [f"algorithm.correction.{key}={value}" for key, value in overrides.items()], needs_data=False
        )


def test_correction_bounds_depend_on_the_kind():
    assert CorrectionConfig("mask", high=4.0).bounds == (0.25, 4.0)
    assert CorrectionConfig("truncate", high=4.0).bounds == (0.0, 4.0)
