"""Value loss of the critic: half the squared error, clipped around the old values as in PPO.

    v_c = clip(v, v_old - clip_range, v_old + clip_range)
    L   = max((v - R)^2, (v_c - R)^2) / 2

R: returns, fixed during the update.

Source: OpenAI baselines, ppo2/model.py; listed among PPO's code-level optimizations in arXiv 2005.12729, section 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.algorithms.interface import check_shapes, masked
from mcore_rl.errors import ConfigError
from mcore_rl.types import ExplainedVariance, Mean, Metric


@dataclass(frozen=True)
class ValueLossResult:
    """Value loss and metrics.

    loss: not reduced, shaped like values, exactly 0 in value and gradient where mask is 0.
    metrics: clip_fraction, share of tokens for which the clipped term was larger; value_mean; returns_mean;
    explained_variance of the returns by old_values, with which the advantages were computed. All of them can be summed
    over micro-batches and ranks.
    """

    loss: Tensor
    metrics: dict[str, Metric]


def compute_value_loss(
    *, values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip_range: float | None
) -> ValueLossResult:
    """Compute the loss per token, with gradient through values only. clip_range None: no clipping.

    Shapes: all [B, T], or any one shape.
    Raises: ConfigError if clip_range is not positive; ValueError for a wrong shape.
    """
    if clip_range is not None and not 0 < clip_range < math.inf:
        raise ConfigError(f"critic.clip_range={clip_range} must be greater than 0, or null to switch it off")
    check_shapes("values", values.shape, old_values=old_values, returns=returns, mask=mask)
    selected = mask > 0
    values, old = masked(values, selected), masked(old_values.detach(), selected)
    target = masked(returns.detach(), selected)
    squares = (values - target).square()
    clipped = torch.zeros_like(selected)
    if clip_range is not None:
        with torch.no_grad():  # where the clipped term is larger, the value is out of bounds and has no gradient
            bounded = (torch.clamp(values, old - clip_range, old + clip_range) - target).square()
            clipped = bounded > squares
        squares = torch.where(clipped, bounded, squares)
    return ValueLossResult(squares / 2, _metrics(values.detach(), old, target, clipped, selected))


@torch.no_grad()
def _metrics(values: Tensor, old: Tensor, returns: Tensor, clipped: Tensor, selected: Tensor) -> dict[str, Metric]:
    target = returns.double()
    error = target - old.double()
    sums = [target.sum(), target.square().sum(), error.sum(), error.square().sum()]
    counts = [clipped.count_nonzero().double(), selected.count_nonzero().double()]
    # One device-to-host transfer instead of one per number.
    stacked = torch.stack([*sums, values.sum(dtype=torch.float64), *counts])
    sum_returns, squares, errors, error_squares, sum_values, clips, count = stacked.tolist()
    return {
        "clip_fraction": Mean(clips, count),
        "value_mean": Mean(sum_values, count),
        "returns_mean": Mean(sum_returns, count),
        "explained_variance": ExplainedVariance(sum_returns, squares, errors, error_squares, count),
    }
