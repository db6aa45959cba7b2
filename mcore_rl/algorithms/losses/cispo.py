"""CISPO: the importance weight is clipped, never the token, so every token keeps a gradient.

    r = exp(logp - old_logp)
    L = -sg[clip(r, 1 - clip_low, 1 + clip_high)] A logp          sg: no gradient flows through it

Source: MiniMax-M1, arXiv 2506.13585, section 3.1. The paper sets clip_low so large that there is no lower bound (here
1) and gives no number for clip_high; the upper bound of 5 is within the range in which arXiv 2510.13786 found no
difference (4 to 8).
Shapes: any one shape for all inputs and the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mcore_rl.algorithms.interface import Needs, PolicyLossInputs, PolicyLossResult, trained
from mcore_rl.algorithms.losses.surrogate import bounded_exp, check_bounds, ratio_metrics


@dataclass(frozen=True)
class CISPO:
    """clip_low, clip_high: distances of the weight's bounds from 1.

    Metrics: those of ratio_metrics, where a weight counts as clipped whatever the sign of its advantage.
    """

    needs: ClassVar[Needs] = Needs(advantages=True, old_logp=True)

    clip_low: float = 1.0
    clip_high: float = 4.0

    def __post_init__(self) -> None:
        check_bounds(self.clip_low, self.clip_high)

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossResult:
        assert inputs.old_logp is not None
        assert inputs.advantages is not None
        selected = inputs.mask > 0
        logp = trained(inputs.logp, selected)
        log_ratio = trained(inputs.logp.detach() - inputs.old_logp, selected)
        ratio = bounded_exp(log_ratio)
        low, high = ratio < 1 - self.clip_low, ratio > 1 + self.clip_high
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss = -weight * trained(inputs.advantages, selected) * logp
        return PolicyLossResult(loss, ratio_metrics(log_ratio, selected, low=low, high=high))
