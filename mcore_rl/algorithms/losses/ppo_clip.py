"""PPO's clipped surrogate with separate bounds (DAPO's clip-higher) and optional dual clip.

    r     = exp(logp - old_logp)
    L     = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))
    A < 0 and dual_clip = c:   L = min(L, -A c)

Source: PPO, arXiv 1707.06347, equation 7; clip-higher: DAPO, arXiv 2503.14476, equation 10;
dual clip: arXiv 1912.09729, equation 5.
Shapes: any one shape for all inputs and the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mcore_rl.algorithms.interface import Needs, PolicyLossInputs, PolicyLossResult, trained
from mcore_rl.errors import ConfigError
from mcore_rl.types import Mean, Metric

# exp(20) is 4.9e8: farther away a ratio says only that the policy has moved on, and must not become inf * 0 = nan
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class PPOClip:
    """clip_low, clip_high: distances of the bounds from 1. dual_clip: the ratio at which the loss of a token with
    negative advantage stops growing; None is off.

    Metrics: clip_fraction, tokens whose gradient the clip removed; ppo_kl, mean of old_logp - logp;
    dual_clip_fraction (with dual_clip only).
    """

    needs: ClassVar[Needs] = Needs(advantages=True, old_logp=True)

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        section = "algorithm.policy_loss"
        if not 0 <= self.clip_low <= 1:
            raise ConfigError(f"{section}.clip_low={self.clip_low} must be between 0 and 1")
        if not 0 <= self.clip_high < torch.inf:
            raise ConfigError(f"{section}.clip_high={self.clip_high} must not be negative")
        if self.dual_clip is not None and not 1 < self.dual_clip < torch.inf:
            raise ConfigError(f"{section}.dual_clip={self.dual_clip} must be greater than 1, or null to switch it off")

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossResult:
        assert inputs.old_logp is not None
        assert inputs.advantages is not None
        selected = inputs.mask > 0
        log_ratio = trained(inputs.logp - inputs.old_logp, selected)
        advantages = trained(inputs.advantages, selected)

        ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        unclipped = -advantages * ratio
        clipped = -advantages * ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss = torch.maximum(unclipped, clipped)
        counts = {"clip_fraction": clipped > unclipped, "ppo_kl": -log_ratio}
        if self.dual_clip is not None:
            ceiling = -advantages * self.dual_clip
            capped = (advantages < 0) & (loss > ceiling)
            loss = torch.where(capped, ceiling, loss)
            counts["dual_clip_fraction"] = capped
        return PolicyLossResult(loss, _means(counts, selected))


@torch.no_grad()
def _means(values: dict[str, Tensor], selected: Tensor) -> dict[str, Metric]:
    # Values are 0 outside the mask. One transfer for all sums: each would wait for the device.
    sums = [value.sum(dtype=torch.float64) for value in (*values.values(), selected)]
    *totals, count = torch.stack(sums).tolist()
    return {name: Mean(total, count) for name, total in zip(values, totals, strict=True)}
