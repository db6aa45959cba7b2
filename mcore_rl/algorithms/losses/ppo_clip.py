"""PPO's clipped surrogate with separate bounds (DAPO's clip-higher) and optional dual clip.

    r     = exp(logp - old_logp)
    L     = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))
    A < 0 and dual_clip = c:   L = min(L, -A c)

Source: PPO, arXiv 1707.06347, equation 7; clip-higher: DAPO, arXiv 2503.14476, equation 10;
dual clip: arXiv 1912.09729, equation 5.
Shapes: all inputs and the loss have the same shape, which may be any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mcore_rl.algorithms.interface import Needs, PolicyLossInputs, PolicyLossResult
from mcore_rl.algorithms.losses.surrogate import (
    check_bounds,
    check_dual_clip,
    clipped_surrogate,
    ratio_inputs,
    ratio_metrics,
    split_by_sign,
)


@dataclass(frozen=True)
class PPOClip:
    """PPO loss. clip_low, clip_high: distances of the bounds from 1. dual_clip: ratio at which the loss of a token with
    negative advantage stops growing; None: off.

    Metrics: ratio_metrics, and dual_clip_fraction (with dual_clip only).
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
