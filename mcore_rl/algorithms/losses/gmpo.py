"""GMPO: the geometric instead of the arithmetic mean of a response's clipped token ratios.

    d_t = logp_t - old_logp_t
    e_t = min(d_t, clip_high) if A_t > 0;   max(d_t, -clip_low) if A_t < 0             (the side that PPO clips)
    G_i = exp(mean_t e_t)                      over the trained tokens of response i
    L_it = -A_it G_i

Every token has the loss of its response, so the mean over tokens is the paper's term -A_i G_i.

Source: arXiv 2507.20673, section 3 (the clipped objective and its sign-aware, token-level clip in log space); bounds
e^-0.4 and e^0.4: section 4. The paper aggregates by the mean over responses, which is seq-mean-token-mean here.
Shapes: [B, T], one whole response per row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from mcore_rl.algorithms.interface import Needs, PolicyLossInputs, PolicyLossResult
from mcore_rl.algorithms.losses.sequences import row_means
from mcore_rl.algorithms.losses.surrogate import MAX_LOG_RATIO, SECTION, bounded_exp, ratio_inputs, ratio_metrics
from mcore_rl.errors import ConfigError


@dataclass(frozen=True)
class GMPO:
    """GMPO loss. clip_low, clip_high: distances of the bounds of the log ratio from 0, in nats.

    Metrics: ratio_metrics of the token ratios.
    """

    needs: ClassVar[Needs] = Needs(advantages=True, old_logp=True, whole_sequence=True)

    clip_low: float = 0.4
    clip_high: float = 0.4

    def __post_init__(self) -> None:
        for name in ("clip_low", "clip_high"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{SECTION}.{name}={getattr(self, name)} must not be negative")

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
