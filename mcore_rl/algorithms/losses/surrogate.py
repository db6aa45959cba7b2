"""Shared parts of losses with a probability ratio: PPO's clipped surrogate, its bounds and its metrics.

    r = exp(logp - old_logp)
    L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high));   A < 0 and dual_clip = c:  L = min(L, -A c)

Source: PPO, arXiv 1707.06347, equation 7; separate bounds: DAPO, arXiv 2503.14476, equation 10; dual clip:
arXiv 1912.09729, equation 5. KL from samples: J. Schulman, "Approximating KL divergence" (2020), k1 and k3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.algorithms.interface import Needs, PolicyLossInputs, masked
from mcore_rl.algorithms.quantiles import count_rounded, ratio_quantiles
from mcore_rl.errors import ConfigError
from mcore_rl.types import Max, Mean, Metric, Min

SECTION = "algorithm.policy_loss"
# exp(20) = 4.9e8. Larger ratios carry no information and could give inf * 0 = nan.
MAX_LOG_RATIO = 20.0
ANCHORS = ("old", "rollout")
"""Denominators of a ratio: the trainer's policy before the first update of a batch, or the engine's at sampling."""


@dataclass(frozen=True)
class Surrogate:
    """Loss and flags, shaped like the log ratio. clipped, capped: bool, tokens where the clip or dual clip applied."""

    loss: Tensor
    clipped: Tensor
    capped: Tensor | None


def ratio_inputs(inputs: PolicyLossInputs, anchor: str = "old") -> tuple[Tensor, Tensor, Tensor]:
    """Return the mask of trained tokens (bool), the log ratio and the advantages, both 0 elsewhere.

    anchor: denominator of the ratio: old, logp - old_logp; rollout, logp - rollout_logp.
    """
    denominator = inputs.old_logp if anchor == "old" else inputs.rollout_logp
    assert denominator is not None
    assert inputs.advantages is not None
    selected = inputs.mask > 0
    return selected, masked(inputs.logp - denominator, selected), masked(inputs.advantages, selected)


def anchored_needs(anchor: str, *, whole_sequence: bool = False) -> Needs:
    """Return the inputs of a loss whose ratio has the denominator `anchor`."""
    return Needs(
        advantages=True,
        old_logp=anchor == "old",
        rollout_logp=anchor == "rollout",
        whole_sequence=whole_sequence,
    )


def check_anchor(anchor: str, key: str = "anchor") -> None:
    """Check the denominator of a ratio. Raises: ConfigError."""
    if anchor not in ANCHORS:
        raise ConfigError(f"{SECTION}.{key}={anchor} is not known. Known: {', '.join(ANCHORS)}.")


def check_positive(**options: float) -> None:
    """Check that options are finite and greater than 0. Raises: ConfigError."""
    for name, value in options.items():
        if not 0 < value < math.inf:
            raise ConfigError(f"{SECTION}.{name}={value} must be finite and greater than 0")


def with_gradient_of(logp: Tensor, value: Tensor) -> Tensor:
    """Return `value` with the gradient of logp times `value`, i.e. value * exp(logp - sg[logp])."""
    return value + value * (logp - logp.detach())


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Compute exp(log_ratio) with the exponent limited to +-MAX_LOG_RATIO; no gradient beyond the limit."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Surrogate:
    """Compute PPO's loss per token (formula in the module docstring), with gradient through log_ratio."""
    ratio = bounded_exp(log_ratio)
    unclipped = -advantages * ratio
    with torch.no_grad():  # where the clipped term is larger, the ratio is out of bounds and has no gradient
        bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
        clipped = bounded > unclipped
    loss = torch.where(clipped, bounded, unclipped)
    if dual_clip is None:
        return Surrogate(loss, clipped, None)
    ceiling = -advantages * dual_clip
    capped = (advantages < 0) & (loss > ceiling)
    return Surrogate(torch.where(capped, ceiling, loss), clipped, capped)


@torch.no_grad()
def ratio_metrics(
    log_ratio: Tensor, selected: Tensor, *, low: Tensor | None, high: Tensor | None, **means: Tensor
) -> dict[str, Metric]:
    """Compute the metrics common to all losses with a ratio, over the trained tokens.

    clip_fraction and its parts clip_fraction_low and clip_fraction_high (clipped at the lower or upper bound; low or
    high None: the loss has no such bound); ppo_kl and ppo_kl_low_var, the k1 and k3 estimates of KL(old || policy);
    ratio_mean, ratio_max, ratio_min; the quantiles of quantiles.py; the mean of each of `means`. All except ppo_kl
    limit log ratios to +-MAX_LOG_RATIO.

    Shapes: the same for all; low, high, selected bool. All tensors must be 0 (false) where `selected` is false.
    """
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    growth = torch.expm1(bounded.double())  # exp(d) - 1 - d cancels in float32
    total_growth, total_bounded = growth.sum(), bounded.sum(dtype=torch.float64)
    sums = {
        "clip_fraction_low": _count(low, selected),
        "clip_fraction_high": _count(high, selected),
        "ppo_kl": -log_ratio.sum(dtype=torch.float64),
        "ppo_kl_low_var": total_growth - total_bounded,
        "ratio_mean": total_growth,
        **{name: _total(value) for name, value in means.items()},
    }
    largest, smallest = _extremes(bounded, selected)
    # One device-to-host transfer instead of one per number.
    stacked = torch.stack([*sums.values(), largest, smallest, _count(selected, selected)])
    found = torch.cat([stacked, count_rounded(bounded, selected)]).tolist()
    *totals, greatest, least, count = found[: len(stacked)]
    named = dict(zip(sums, totals, strict=True))
    named["clip_fraction"] = named["clip_fraction_low"] + named["clip_fraction_high"]
    # sum of r = sum of (r - 1) + count
    named["ratio_mean"] += count
    metrics: dict[str, Metric] = {name: Mean(total, count) for name, total in named.items()}
    if count:
        metrics |= {"ratio_max": Max(math.exp(greatest)), "ratio_min": Min(math.exp(least))}
        metrics |= ratio_quantiles(found[len(stacked) :])
    return metrics


def check_bounds(clip_low: float, clip_high: float) -> None:
    """Check the clip range of a ratio. Raises: ConfigError."""
    # A ratio is never below 0, so a distance above 1 would have no effect.
    if not 0 <= clip_low <= 1:
        raise ConfigError(f"{SECTION}.clip_low={clip_low} must be between 0 and 1")
    if not 0 <= clip_high < math.inf:
        raise ConfigError(f"{SECTION}.clip_high={clip_high} must not be negative")


def check_dual_clip(dual_clip: float | None) -> None:
    """Check that dual_clip is greater than 1 or None. Raises: ConfigError."""
    # A cap of 1 or less would also apply to ratios inside the clip range.
    if dual_clip is not None and not 1 < dual_clip < math.inf:
        raise ConfigError(f"{SECTION}.dual_clip={dual_clip} must be greater than 1, or null to switch it off")


def split_by_sign(clipped: Tensor, advantages: Tensor) -> Mapping[str, Tensor]:
    """Split tokens clipped by PPO by bound: the upper one for positive advantages, the lower for negative ones."""
    high = clipped & (advantages > 0)
    return {"low": clipped ^ high, "high": high}


def _count(flags: Tensor | None, like: Tensor) -> Tensor:
    if flags is None:
        return torch.zeros((), dtype=torch.float64, device=like.device)
    return flags.count_nonzero().double()


def _total(values: Tensor) -> Tensor:
    return values.count_nonzero().double() if values.dtype == torch.bool else values.sum(dtype=torch.float64)


def _extremes(values: Tensor, selected: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest and smallest selected value; undefined if none is selected."""
    if not values.numel():
        nothing = torch.zeros((), dtype=torch.float64, device=values.device)
        return nothing, nothing
    largest = values.masked_fill(~selected, -torch.inf).amax()
    smallest = values.masked_fill(~selected, torch.inf).amin()
    return largest.double(), smallest.double()
