"""The value loss compared with scalar arithmetic, and its explained variance with numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mcore_rl.algorithms import compute_value_loss
from mcore_rl.errors import ConfigError
from mcore_rl.types import ExplainedVariance, Mean, merge_metrics


def make(seed=0, shape=(4, 12), dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    old, shift, returns = torch.randn(3, *shape, generator=g, dtype=torch.float64)
    mask = torch.rand(shape, generator=g) < 0.7
    mask[-1] = False
    given = {"values": old + 0.4 * shift, "old_values": old, "returns": old + returns, "mask": mask}
    return {name: tensor.to(dtype) for name, tensor in given.items()}


@pytest.mark.parametrize("clip_range", [None, 0.1, 0.4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_value_loss_and_gradient_match_ppo2(clip_range, dtype, tolerance):
    given = make(dtype=dtype)
    values = given["values"].clone().requires_grad_()
    result = compute_value_loss(**{**given, "values": values}, clip_range=clip_range)
    result.loss.sum().backward()
    clips = 0
    for i, t in torch.cartesian_prod(torch.arange(4), torch.arange(12)).tolist():
        v, old, target, trained = (given[name][i, t].item() for name in ("values", "old_values", "returns", "mask"))
        loss, gradient = (v - target) ** 2 / 2, v - target
        if clip_range is not None:
            bounded = min(max(v, old - clip_range), old + clip_range)
            if (bounded - target) ** 2 / 2 > loss:
                loss, gradient = (bounded - target) ** 2 / 2, 0.0
                clips += bool(trained)
        assert result.loss[i, t].item() == pytest.approx(loss * trained, rel=tolerance, abs=tolerance)
        assert values.grad[i, t].item() == pytest.approx(gradient * trained, rel=tolerance, abs=tolerance)
    assert result.metrics["clip_fraction"] == Mean(clips, given["mask"].sum())
    assert (clips > 0) == (clip_range is not None)


def test_explained_variance_of_unequal_parts_equals_whole():
    given = make(2)
    given["returns"] = given["returns"] + 100  # an offset, which must not change a variance
    parts = [
        compute_value_loss(**{name: tensor[rows] for name, tensor in given.items()}, clip_range=None).metrics
        for rows in (slice(0, 1), slice(1, 3), slice(3, 4))
    ]
    trained = given["mask"].bool()
    returns, old = given["returns"][trained].numpy(), given["old_values"][trained].numpy()
    expected = 1 - np.var(returns - old) / np.var(returns)
    merged = merge_metrics(parts)
    assert merged["returns_mean"].value == pytest.approx(returns.mean())
    assert merged["explained_variance"].value == pytest.approx(expected, rel=1e-9)
    assert merged["value_mean"].value == pytest.approx(given["values"][trained].mean().item())
    assert merged["explained_variance"] == parts[0]["explained_variance"] + (
        parts[1]["explained_variance"] + parts[2]["explained_variance"]
    )


def test_explained_variance_of_constant_returns_is_none():
    ones = torch.full((2, 50), 0.1)
    mask = torch.ones(2, 50)
    result = compute_value_loss(values=ones, old_values=0 * ones, returns=ones, mask=mask, clip_range=None)
    assert result.metrics["explained_variance"].value == 0.0
    assert ExplainedVariance(0.0, 0.0, 0.0, 0.0, 0.0).value == 0.0
    perfect = torch.arange(50.0).expand(2, 50)
    result = compute_value_loss(values=perfect, old_values=perfect, returns=perfect, mask=mask, clip_range=None)
    assert result.metrics["explained_variance"].value == 1.0


def test_value_loss_ignores_tokens_outside_mask():
    given = make(3)
    clean = compute_value_loss(**given, clip_range=0.2)
    outside = given["mask"] == 0
    for name, junk in (("values", math.nan), ("old_values", math.inf), ("returns", -math.inf)):
        given[name] = given[name].masked_fill(outside, junk)
    values = given.pop("values").requires_grad_()
    dirty = compute_value_loss(values=values, **given, clip_range=0.2)
    dirty.loss.sum().backward()
    assert torch.equal(dirty.loss, clean.loss)
    assert dirty.metrics == clean.metrics
    assert not values.grad[outside].any()


def test_value_loss_gradient_reaches_values_only():
    given = {name: tensor.clone().requires_grad_(name != "mask") for name, tensor in make(4).items()}
    compute_value_loss(**given, clip_range=0.2).loss.sum().backward()
    assert [name for name, tensor in given.items() if tensor.grad is not None] == ["values"]


def test_value_loss_without_trained_tokens_gives_empty_sums():
    empty = torch.zeros(0, 5)
    result = compute_value_loss(values=empty, old_values=empty, returns=empty, mask=empty, clip_range=0.2)
    assert result.loss.shape == (0, 5)
    assert all(metric.count == 0 and metric.value == 0 for metric in result.metrics.values())


def test_value_loss_with_invalid_arguments_raises():
    given = make()
    with pytest.raises(ConfigError, match=r"critic\.clip_range=0"):
        compute_value_loss(**given, clip_range=0.0)
    with pytest.raises(ValueError, match=r"returns \[4, 1\] must have the shape of values, \[4, 12\]"):
        compute_value_loss(**{**given, "returns": given["returns"][:, :1]}, clip_range=None)
