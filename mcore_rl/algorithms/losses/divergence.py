"""Losses whose trust region bounds a divergence between two policies instead of the ratio of probabilities."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.algorithms.interface import Needs, PolicyLossInputs, PolicyLossResult, masked
from mcore_rl.algorithms.losses.surrogate import (
    MAX_LOG_RATIO,
    SECTION,
    anchored_needs,
    bounded_exp,
    check_anchor,
    ratio_inputs,
    ratio_metrics,
    with_gradient_of,
)
from mcore_rl.errors import ConfigError

LARGEST_LOGP = -1e-12
"""Upper bound of log-probabilities in the binary KL: the probability of all other tokens needs a logarithm."""


class DivergenceLoss(ABC):
    """Base class of losses whose trust region bounds a divergence between two distributions over two outcomes: the
    sampled token, and any other token."""

    clip_low: float
    clip_high: float
    ratio_cap: float | None
    anchor: str
    mask_anchor: str | None

    @property
    def needs(self) -> Needs:
        needs = anchored_needs(self.anchor)
        return needs if self.mask_anchor is None else needs | anchored_needs(self.mask_anchor)

    def check(self) -> None:
        """Check the options. Raises: ConfigError."""
        check_anchor(self.anchor)
        if self.mask_anchor is not None:
            check_anchor(self.mask_anchor, "mask_anchor")
        for name in ("clip_low", "clip_high"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{SECTION}.{name}={getattr(self, name)} must be finite and at least 0")
        if self.ratio_cap is not None and not 1 < self.ratio_cap < math.inf:
            raise ConfigError(f"{SECTION}.ratio_cap={self.ratio_cap} must be finite and greater than 1")

    @abstractmethod
    def divergence(self, logp: Tensor, anchor_logp: Tensor) -> Tensor:
        """Return the divergence over the two outcomes per token. Shapes: float64 [N] each. Units: see the loss."""

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossResult:
        selected, log_ratio, advantages = ratio_inputs(inputs, self.anchor)
        log_ratio = log_ratio.detach()
        center = inputs.old_logp if (self.mask_anchor or self.anchor) == "old" else inputs.rollout_logp
        assert center is not None
        logp = masked(inputs.logp, selected)
        with torch.no_grad():
            divergence = self.divergence(logp.double(), masked(center, selected).double())
            # Only tokens that the update would move further away from the center are outside.
            moved = log_ratio if self.mask_anchor in (None, self.anchor) else masked(logp - center, selected)
            high = (advantages > 0) & (moved > 0) & (divergence > self.clip_high)
            low = (advantages < 0) & (moved < 0) & (divergence > self.clip_low)
            ratio = bounded_exp(log_ratio).clamp(max=math.inf if self.ratio_cap is None else self.ratio_cap)
            value = masked(-advantages * ratio, ~(low | high))
        means = {"divergence": masked(divergence, selected)}
        if self.ratio_cap is None:
            # As in the other losses with a ratio: beyond the limit the loss keeps its value but has no gradient.
            logp = torch.where(log_ratio > MAX_LOG_RATIO, logp.detach(), logp)
        else:
            means["ratio_cap_fraction"] = log_ratio > math.log(self.ratio_cap)
        return PolicyLossResult(
            with_gradient_of(logp, value), ratio_metrics(log_ratio, selected, low=low, high=high, **means)
        )


@dataclass(frozen=True)
class DPPOTV(DivergenceLoss):
    """DPPO-Binary-TV: a trust region that bounds the total variation of the sampled token's probability.

        r = exp(logp - rollout_logp)                    ratio to the engine's policy; anchor=old: to the old policy
        D = |exp(logp) - exp(rollout_logp)|             total variation over the sampled token and any other token
        M = 0 if A > 0, r > 1 and D > clip_high;  0 if A < 0, r < 1 and D > clip_low;  else 1
        L = -M A r                                      ratio_cap = c: -M A sg[min(r, c)] exp(logp - sg[logp])

    A token outside the region has loss 0 and no gradient.

    clip_low, clip_high: largest divergence of tokens that become less or more probable. ratio_cap: upper bound of the
    ratio as a weight of the gradient; None: off. anchor: denominator of r and second policy of D: the engine at
    sampling (rollout), or the trainer's policy before the first update of the batch (old). mask_anchor: another second
    policy of D, and of r in the conditions of M, so that it changes the mask only; None: anchor.

    Metrics: ratio_metrics; clip fractions count tokens outside the region; divergence, the mean of D;
    ratio_cap_fraction (with ratio_cap only).

    Source: arXiv 2602.04879, equation 12 (objective and mask) and section 4.4 (binary approximation); the anchor:
    section 5.2, which finds a mask of the recomputed policy unstable (mask_anchor=old). Threshold: 0.15 in appendix C
    and the authors' example, mostly 0.2 in appendix E. The paper's objective is a sum over tokens (seq-mean-token-sum);
    the authors' example in verl aggregates by seq-mean-token-sum-norm. The paper's gradient has ratio_cap 5 in the
    scaling experiments, and none in the analysis; section 5.4 warns of small caps.
    Shapes: any one shape for all inputs and the loss.
    """

    clip_low: float = 0.15
    clip_high: float = 0.15
    ratio_cap: float | None = None
    anchor: str = "rollout"
    mask_anchor: str | None = None

    def __post_init__(self) -> None:
        self.check()

    def divergence(self, logp: Tensor, anchor_logp: Tensor) -> Tensor:
        # Rounding may give a log-probability slightly above 0.
        return (logp.clamp(max=0).exp() - anchor_logp.clamp(max=0).exp()).abs()


@dataclass(frozen=True)
class DPPOKL(DivergenceLoss):
    """DPPO-Binary-KL: a trust region that bounds the KL divergence over the sampled token and any other token.

        r = exp(logp - rollout_logp)                    ratio to the engine's policy; anchor=old: to the old policy
        D = Q log(Q / P) + (1 - Q) log((1 - Q) / (1 - P)),      P = exp(logp), Q = exp(rollout_logp)
        M = 0 if A > 0, r > 1 and D > clip_high;  0 if A < 0, r < 1 and D > clip_low;  else 1
        L = -M A r                                      ratio_cap = c: -M A sg[min(r, c)] exp(logp - sg[logp])

    A token outside the region has loss 0 and no gradient.

    clip_low, clip_high: largest divergence in nats, of tokens that become less or more probable. ratio_cap, anchor,
    mask_anchor: see dppo_tv.

    Metrics: see dppo_tv; divergence is in nats.

    Source: arXiv 2602.04879, equations 12 and 14. Threshold: 0.05 in appendices C and E and the authors' example. The
    rest: see dppo_tv.
    Shapes: any one shape for all inputs and the loss.
    """

    clip_low: float = 0.05
    clip_high: float = 0.05
    ratio_cap: float | None = None
    anchor: str = "rollout"
    mask_anchor: str | None = None

    def __post_init__(self) -> None:
        self.check()

    def divergence(self, logp: Tensor, anchor_logp: Tensor) -> Tensor:
        logp, anchor_logp = logp.clamp(max=LARGEST_LOGP), anchor_logp.clamp(max=LARGEST_LOGP)
        # P - 1 and Q - 1, exact for small and large probabilities; the formula in these takes the fewest passes.
        below, anchor_below = torch.expm1(logp), torch.expm1(anchor_logp)
        gap = anchor_logp - logp
        return torch.addcmul(gap, anchor_below, gap - (anchor_below / below).log_())
