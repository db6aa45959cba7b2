"""Losses with one probability ratio per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mcore_rl.algorithms.interface import Needs, PolicyLossInputs, PolicyLossResult, masked
from mcore_rl.algorithms.losses.surrogate import (
    SECTION,
    anchored_needs,
    bounded_exp,
    check_anchor,
    check_bounds,
    check_dual_clip,
    clipped_surrogate,
    ratio_inputs,
    ratio_metrics,
    split_by_sign,
)
from mcore_rl.errors import ConfigError


@dataclass(frozen=True)
class PPOClip:
    """PPO's clipped surrogate with separate bounds (DAPO's clip-higher) and optional dual clip.

        r     = exp(logp - old_logp)                    ratio to the old policy
        L     = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))
        A < 0 and dual_clip = c:   L = min(L, -A c)

    clip_low, clip_high: distances of the bounds from 1. dual_clip: ratio at which the loss of a token with
    negative advantage stops growing; None: off.

    Metrics: ratio_metrics, and dual_clip_fraction (with dual_clip only).

    Source: PPO, arXiv 1707.06347, equation 7; clip-higher: DAPO, arXiv 2503.14476, equation 10;
    dual clip: arXiv 1912.09729, equation 5.
    Shapes: all inputs and the loss have the same shape, which may be any.
    """

    needs: ClassVar[Needs] = Needs(advantages=True, old_logp=True)

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        check_bounds(self.clip_low, self.clip_high)
        check_dual_clip(self.dual_clip)

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossResult:
        selected, log_ratio, advantages = ratio_inputs(inputs)
        result = clipped_surrogate(log_ratio, advantages, self.clip_low, self.clip_high, self.dual_clip)
        # Without dual clip the metric is omitted instead of being 0.
        capped = {} if result.capped is None else {"dual_clip_fraction": result.capped}
        flags = split_by_sign(result.clipped, advantages)
        return PolicyLossResult(result.loss, ratio_metrics(log_ratio, selected, **flags, **capped))


PROXIMAL = ("recomputed", "loglinear", "metrics")


@dataclass(frozen=True)
class DecoupledPPO:
    """Decoupled PPO: clips around a recent proximal policy; tokens were sampled by an older behavior policy.

        w = exp(prox - behave)                          ratio to the engine; behave: its log-probability at sampling
        r = exp(logp - prox)                            ratio to the proximal policy
        L = w max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))           with dual_clip = c and A < 0: min(., -A c)

    prox is the policy before the updates of a batch, version v of the weights; the updates produce version v + 1. Its
    log-probabilities are recomputed by a forward pass, or interpolated (detached) for a token of version b and
    staleness s = v + 1 - b:

        prox ~ behave + alpha (logp - behave),   alpha = (v - b) / (v + 1 - b) = (s - 1) / s

    s = 1 means that the engine sampled with prox itself: then prox ~ behave and w = 1, as in every synchronous run. s
    below 1 is treated as 1.

    clip_low, clip_high, dual_clip: see ppo_clip, for the ratio r to the proximal policy.

    prox: source of the proximal policy's log-probabilities.
        recomputed: inputs.prox_logp, or inputs.old_logp if that is None; the trainer computes old_logp before the first
            update of a batch.
        loglinear: interpolated; no forward pass is needed.
        metrics: recomputed, and the error of the interpolation is reported.

    Metrics: ratio_metrics of r; dual_clip_fraction (with dual_clip only); behave_weight, the mean of w; prox_error and
    prox_weight_error, mean absolute differences in nats and in w (with prox=metrics only).

    Source: arXiv 2110.00641, section 3 (decoupled clipped objective); for language models AReaL, arXiv 2505.24298,
    section 5.2; interpolation: AReaL's documentation, "Proximal log-probability approximation" (loglinear).
    Shapes: any one shape for all inputs and the loss.
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
        """Return the log-probabilities of the proximal policy, and the interpolated ones if prox=metrics."""
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


@dataclass(frozen=True)
class CISPO:
    """CISPO: clips the importance weight instead of the token's loss, so every token keeps its gradient.

        r = exp(logp - old_logp)                             anchor=rollout: r = exp(logp - rollout_logp)
        L = -sg[clip(r, 1 - clip_low, 1 + clip_high)] A logp          sg: stop-gradient

    clip_low, clip_high: distances of the weight's bounds from 1. anchor: denominator of the weight. rollout uses the
    engine's log-probabilities at sampling, so the weight also corrects the difference between engine and trainer; no
    pass for old log-probabilities is needed, and corrections are rejected.

    Metrics: ratio_metrics; a weight out of bounds counts as clipped for either sign of the advantage.

    Source: MiniMax-M1, arXiv 2506.13585, section 3.1, with the ratio to the old policy. The paper sets clip_low so high
    that there is no lower bound (here 1) and gives no value for clip_high. The default upper bound 1 + clip_high = 5 is
    one of 4, 5 and 8, between which ScaleRL, arXiv 2510.13786, found no difference; its ratio is anchor=rollout.
    Shapes: any one shape for all inputs and the loss.
    """

    clip_low: float = 1.0
    clip_high: float = 4.0
    anchor: str = "old"

    def __post_init__(self) -> None:
        check_bounds(self.clip_low, self.clip_high)
        check_anchor(self.anchor)

    @property
    def needs(self) -> Needs:
        return anchored_needs(self.anchor)

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossResult:
        selected, log_ratio, advantages = ratio_inputs(inputs, self.anchor)
        # The weight has no gradient; only logp in the loss has one.
        log_ratio = log_ratio.detach()
        ratio = bounded_exp(log_ratio)
        low, high = ratio < 1 - self.clip_low, ratio > 1 + self.clip_high
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss = -weight * advantages * masked(inputs.logp, selected)
        return PolicyLossResult(loss, ratio_metrics(log_ratio, selected, low=low, high=high))
