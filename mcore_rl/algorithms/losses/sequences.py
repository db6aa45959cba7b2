"""Losses with one ratio per response. Shape letters: B responses, one per row, T tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mcore_rl.algorithms.interface import Needs, PolicyLossInputs, PolicyLossResult, masked
from mcore_rl.algorithms.losses.surrogate import (
    MAX_LOG_RATIO,
    SECTION,
    bounded_exp,
    check_bounds,
    ratio_inputs,
    ratio_metrics,
    with_gradient_of,
)
from mcore_rl.algorithms.quantiles import count_rounded, ratio_quantiles
from mcore_rl.errors import ConfigError
from mcore_rl.types import Max, Mean, Metric, Min


def row_means(values: Tensor, selected: Tensor) -> Tensor:
    """Return the mean of the selected values of each row, 0 for a row without any; summed in float64.

    Shapes: values [B, T], 0 where `selected` (bool) is false -> float64 [B].
    """
    return values.sum(-1, dtype=torch.float64) / selected.sum(-1).clamp(min=1)


@torch.no_grad()
def sequence_metrics(
    log_ratio: Tensor, selected: Tensor, row_log_ratio: Tensor, *, low: Tensor, high: Tensor, **means: Tensor
) -> dict[str, Metric]:
    """Compute ratio_metrics, with clip fractions, ratios and their quantiles per response: each response counts once.
    The mean of each of `means` is over tokens.

    A response whose tokens have different advantages may be clipped in part; its share of clipped tokens counts.

    Shapes: log_ratio, selected, low, high [B, T]; row_log_ratio [B], the log of each response's ratio.
    """
    tokens = ratio_metrics(log_ratio, selected, low=None, high=None, **means)
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


@dataclass(frozen=True)
class GSPO:
    """GSPO: one ratio per response, the geometric mean over its tokens, clipped as a whole.

        s_i   = exp(mean_t (logp_it - old_logp_it))            over the n_i trained tokens of response i:
                                                               its ratio to the old policy
        s_it  = sg[s_i] exp(logp_it - sg[logp_it])             value s_i, gradient of token t only; sg: stop-gradient
        L_it  = max(-A_it s_it, -A_it clip(s_it, 1 - clip_low, 1 + clip_high))

    The objective has no upper bound for a negative advantage, so a response that became far more probable would give a
    gradient of A s_i: 5e8 A at log s_i = 20, and clip_grad would scale all other responses to nothing. log s_i is
    therefore limited to +-20 nats, like all ratios of these losses; beyond it a response has a value but no gradient.

    clip_low, clip_high: distances of the bounds of s_i from 1.

    Metrics: sequence_metrics of the ratios s_i.

    Source: arXiv 2507.18071, equations 7 (s_i), 13 and 14 (GSPO-token; equals GSPO if a response has one advantage);
    bounds of 3e-4 and 4e-4: section 5.1. The paper aggregates by seq-mean-token-mean.
    Shapes: [B, T], one whole response per row.
    """

    needs: ClassVar[Needs] = Needs(advantages=True, old_logp=True, whole_sequence=True)

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def __post_init__(self) -> None:
        check_bounds(self.clip_low, self.clip_high)

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossResult:
        selected, log_ratio, advantages = ratio_inputs(inputs)
        logp, log_ratio = masked(inputs.logp, selected), log_ratio.detach()
        row_log_ratio = row_means(log_ratio, selected)
        ratio = bounded_exp(row_log_ratio).to(logp.dtype)[:, None]
        low = (advantages < 0) & (ratio < 1 - self.clip_low)
        high = (advantages > 0) & (ratio > 1 + self.clip_high)
        # Beyond the limit, detach logp: the loss keeps its value but has no gradient.
        within = row_log_ratio.abs() <= MAX_LOG_RATIO
        loss = with_gradient_of(torch.where(within[:, None], logp, logp.detach()), -advantages * ratio)
        # No gradient: `ratio` comes from detached log-probabilities.
        bounded = -advantages * ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        return PolicyLossResult(
            torch.where(low | high, bounded, loss),
            sequence_metrics(log_ratio, selected, row_log_ratio, low=low, high=high),
        )


@dataclass(frozen=True)
class GMPO:
    """GMPO: the geometric instead of the arithmetic mean of a response's clipped token ratios.

        d_t = logp_t - old_logp_t                                                  log ratio to the old policy
        e_t = min(d_t, clip_high) if A_t > 0;   max(d_t, -clip_low) if A_t < 0             (the side that PPO clips)
        G_i = exp(mean_t e_t)                      over the trained tokens of response i
        L_it = -A_it G_i

    Every token has the loss of its response, so the mean over tokens is the paper's term -A_i G_i.

    clip_low, clip_high: distances of the bounds of the log ratio from 0, in nats.

    Metrics: ratio_metrics of the token ratios.

    Source: arXiv 2507.20673, section 3 (the clipped objective and its sign-aware, token-level clip in log space);
    bounds e^-0.4 and e^0.4: section 4. The paper aggregates by the mean over responses, which is seq-mean-token-mean
    here.
    Shapes: [B, T], one whole response per row.
    """

    needs: ClassVar[Needs] = Needs(advantages=True, old_logp=True, whole_sequence=True)

    clip_low: float = 0.4
    clip_high: float = 0.4

    def __post_init__(self) -> None:
        for name in ("clip_low", "clip_high"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{SECTION}.{name}={getattr(self, name)} must be finite and at least 0")

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossResult:
        selected, log_ratio, advantages = ratio_inputs(inputs)
        high = (advantages > 0) & (log_ratio > self.clip_high)
        low = (advantages < 0) & (log_ratio < -self.clip_low)
        # Without this bound, one token with a log ratio of 100 nats would dominate the mean.
        bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        # A clipped token becomes a constant: it counts in the mean of its response but has no gradient.
        bounded = torch.where(high, self.clip_high, torch.where(low, -self.clip_low, bounded))
        geometric = bounded_exp(row_means(bounded, selected)).to(log_ratio.dtype)
        loss = -advantages * geometric[:, None]
        return PolicyLossResult(loss, ratio_metrics(log_ratio.detach(), selected, low=low, high=high))
