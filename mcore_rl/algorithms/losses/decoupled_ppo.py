"""Decoupled PPO: clips around a recent proximal policy; tokens were sampled by an older behavior policy.

    w = exp(prox - behave)                                             behave: log-probability at sampling time
    r = exp(logp - prox)
    L = w max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))           with dual_clip = c and A < 0: min(., -A c)

prox is the policy before the updates of a batch, version v of the weights; the updates produce version v + 1. Its
log-probabilities are recomputed by a forward pass, or interpolated (detached) for a token of version b and staleness
s = v + 1 - b:

    prox ~ behave + alpha (logp - behave),   alpha = (v - b) / (v + 1 - b) = (s - 1) / s

s = 1 means that the engine sampled with prox itself: then prox ~ behave and w = 1, as in every synchronous run. s below
1 is treated as 1.

Source: arXiv 2110.00641, section 3 (decoupled clipped objective); for language models AReaL, arXiv 2505.24298,
section 5.2; interpolation: AReaL's documentation, "Proximal log-probability approximation" (loglinear).
Shapes: any one shape for all inputs and the loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.algorithms.interface import Needs, PolicyLossInputs, PolicyLossResult, masked
from mcore_rl.algorithms.losses.surrogate import (
    SECTION,
    bounded_exp,
    check_bounds,
    check_dual_clip,
    clipped_surrogate,
    ratio_metrics,
    split_by_sign,
)
from mcore_rl.errors import ConfigError

PROXIMAL = ("recomputed", "loglinear", "metrics")


@dataclass(frozen=True)
class DecoupledPPO:
    """Decoupled PPO loss. clip_low, clip_high, dual_clip: see ppo_clip, for the ratio r to the proximal policy.

    prox: source of the proximal policy's log-probabilities.
        recomputed: inputs.prox_logp, or inputs.old_logp if that is None; the trainer computes old_logp before the first
            update of a batch.
        loglinear: interpolated; no forward pass is needed.
        metrics: recomputed, and the error of the interpolation is reported.

    Metrics: ratio_metrics of r; dual_clip_fraction (with dual_clip only); behave_weight, the mean of w; prox_error and
    prox_weight_error, mean absolute differences in nats and in w (with prox=metrics only).
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    prox: str = "recomputed"

    def __post_init__(self) -> None:
        check_bounds(self.clip_low, self.clip_high)
        check_dual_clip(self.dual_clip)
        if self.prox not in PROXIMAL:
            raise ConfigError(f"{SECTION}.prox={self.prox} is not known. Known: {', '.join(PROXIMAL)}.")

    @property
    def needs(self) -> Needs:
        return Needs(
            advantages=True,
            rollout_logp=True,
            old_logp=self.prox != "loglinear",
            staleness=self.prox != "recomputed",
        )

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossResult:
        assert inputs.advantages is not None
        assert inputs.rollout_logp is not None
        selected = inputs.mask > 0
        advantages = masked(inputs.advantages, selected)
        prox, approximation = self._proximal(inputs)
        log_ratio = masked(inputs.logp - prox, selected)
        weight = masked(bounded_exp(prox - inputs.rollout_logp), selected)
        # weight > 0, so scaling the advantage scales the loss and leaves the clip's decision unchanged.
        result = clipped_surrogate(log_ratio, weight * advantages, self.clip_low, self.clip_high, self.dual_clip)
        means = {"behave_weight": weight}
        if result.capped is not None:
            means["dual_clip_fraction"] = result.capped
        if approximation is not None:
            approximate = masked(bounded_exp(approximation - inputs.rollout_logp), selected)
            means["prox_error"] = masked((approximation - prox).abs(), selected)
            means["prox_weight_error"] = (approximate - weight).abs()
        flags = split_by_sign(result.clipped, advantages)
        return PolicyLossResult(result.loss, ratio_metrics(log_ratio, selected, **flags, **means))

    @torch.no_grad()
    def _proximal(self, inputs: PolicyLossInputs) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of the proximal policy, and the interpolated ones if prox=metrics."""
        if self.prox == "loglinear":
            return _interpolated(inputs), None
        recomputed = inputs.old_logp if inputs.prox_logp is None else inputs.prox_logp
        assert recomputed is not None
        return recomputed.detach(), _interpolated(inputs) if self.prox == "metrics" else None


def _interpolated(inputs: PolicyLossInputs) -> Tensor:
    assert inputs.staleness is not None
    assert inputs.rollout_logp is not None
    # (s - 1) / s; a staleness below 1 is treated as 1, which gives the behavior policy itself.
    alpha = 1 - inputs.staleness.to(inputs.logp.dtype).clamp(min=1).reciprocal()
    return torch.lerp(inputs.rollout_logp, inputs.logp, alpha)
