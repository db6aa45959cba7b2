"""Shared parts of losses over whole responses. Shape letters: B responses, one per row, T tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mcore_rl.algorithms.losses.surrogate import MAX_LOG_RATIO, ratio_metrics
from mcore_rl.algorithms.quantiles import count_rounded, ratio_quantiles
from mcore_rl.types import Max, Mean, Metric, Min


def row_means(values: Tensor, selected: Tensor) -> Tensor:
    """Mean of the selected values of each row, 0 for a row without any; summed in float64.

    Shapes: values [B, T], 0 where `selected` (bool) is false -> float64 [B].
    """
    return values.sum(-1, dtype=torch.float64) / selected.sum(-1).clamp(min=1)


@torch.no_grad()
def sequence_metrics(
    log_ratio: Tensor, selected: Tensor, row_log_ratio: Tensor, *, low: Tensor, high: Tensor
) -> dict[str, Metric]:
    """Compute ratio_metrics, with clip fractions, ratios and their quantiles per response: each response counts once.

    A response whose tokens have different advantages may be clipped in part; its share of clipped tokens counts.

    Shapes: log_ratio, selected, low, high [B, T]; row_log_ratio [B], the log of each response's ratio.
    """
    tokens = ratio_metrics(log_ratio, selected, low=None, high=None)
    length = selected.sum(-1)
    counted = length > 0
    shares = torch.stack([flags.sum(-1) / length.clamp(min=1) for flags in (low, high)]).double().sum(-1)
    # Empty rows must not affect the extremes: they get -inf and +inf below.
    bounded = row_log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    growth = torch.expm1(bounded).sum()  # 0 for a response without tokens
    largest = torch.where(counted, bounded, -torch.inf)
    smallest = torch.where(counted, bounded, torch.inf)
    extremes = (largest.amax(), smallest.amin()) if len(counted) else (growth, growth)
    sums = torch.stack([*shares, growth, *extremes, counted.sum().double()])
    found = torch.cat([sums, count_rounded(bounded, counted)]).tolist()
    clipped_low, clipped_high, above_one, greatest, least, count = found[: len(sums)]
    metrics = tokens | {
        "clip_fraction": Mean(clipped_low + clipped_high, count),
        "clip_fraction_low": Mean(clipped_low, count),
        "clip_fraction_high": Mean(clipped_high, count),
        "ratio_mean": Mean(count + above_one, count),
    }
    if count:
        metrics |= {"ratio_max": Max(math.exp(greatest)), "ratio_min": Min(math.exp(least))}
        metrics |= ratio_quantiles(found[len(sums) :])
    return metrics
