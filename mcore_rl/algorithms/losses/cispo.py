"""CISPO: clips the importance weight instead of the token's loss, so every token keeps its gradient.

    r = exp(logp - old_logp)
    L = -sg[clip(r, 1 - clip_low, 1 + clip_high)] A logp          sg: stop-gradient

Source: MiniMax-M1, arXiv 2506.13585, section 3.1. The paper sets clip_low so high that there is no lower bound (here 1)
and gives no value for clip_high. The default upper bound 1 + clip_high = 5 is in the range 4 to 8, in which
arXiv 2510.13786 found no difference.
Shapes: any one shape for all inputs and the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mcore_rl.algorithms.interface import Needs, PolicyLossInputs, PolicyLossResult, masked
from mcore_rl.algorithms.losses.surrogate import bounded_exp, check_bounds, ratio_inputs, ratio_metrics


@dataclass(frozen=True)
class CISPO:
    """CISPO loss. clip_low, clip_high: distances of the weight's bounds from 1.

    Metrics: ratio_metrics; a weight out of bounds counts as clipped for either sign of the advantage.
    """

    needs: ClassVar[Needs] = Needs(advantages=True, old_logp=True)

    clip_low: float = 1.0
    clip_high: float = 4.0

    def __post_init__(self) -> None:
        check_bounds(self.clip_low, self.clip_high)

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossResult:
        selected, log_ratio, advantages = ratio_inputs(inputs)
        # The weight has no gradient; only logp in the loss has one.
        log_ratio = log_ratio.detach()
        ratio = bounded_exp(log_ratio)
        low, high = ratio < 1 - self.clip_low, ratio > 1 + self.clip_high
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss = -weight * advantages * masked(inputs.logp, selected)
        return PolicyLossResult(loss, ratio_metrics(log_ratio, selected, low=low, high=high))
