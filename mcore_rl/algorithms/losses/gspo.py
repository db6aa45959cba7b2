"""GSPO: one ratio per response, the geometric mean over its tokens, clipped as a whole.

    s_i   = exp(mean_t (logp_it - old_logp_it))                over the n_i trained tokens of response i
    s_it  = sg[s_i] exp(logp_it - sg[logp_it])                 value s_i, gradient of token t only; sg: stop-gradient
    L_it  = max(-A_it s_it, -A_it clip(s_it, 1 - clip_low, 1 + clip_high))

The objective has no upper bound for a negative advantage, so a response that became far more probable would give a
gradient of A s_i: 5e8 A at log s_i = 20, and clip_grad would scale all other responses to nothing. log s_i is therefore
limited to +-20 nats, like all ratios of these losses; beyond it a response has a value but no gradient.

Source: arXiv 2507.18071, equations 7 (s_i), 13 and 14 (GSPO-token; equals GSPO if a response has one advantage);
bounds of 3e-4 and 4e-4: section 5.1. The paper aggregates by seq-mean-token-mean.
Shapes: [B, T], one whole response per row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mcore_rl.algorithms.interface import Needs, PolicyLossInputs, PolicyLossResult, masked
from mcore_rl.algorithms.losses.sequences import row_means, sequence_metrics
from mcore_rl.algorithms.losses.surrogate import MAX_LOG_RATIO, bounded_exp, check_bounds, ratio_inputs


@dataclass(frozen=True)
class GSPO:
    """GSPO loss. clip_low, clip_high: distances of the bounds of s_i from 1.

    Metrics: sequence_metrics of the ratios s_i.
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
        loss = _with_gradient_of(torch.where(within[:, None], logp, logp.detach()), -advantages * ratio)
        # No gradient: `ratio` comes from detached log-probabilities.
        bounded = -advantages * ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        return PolicyLossResult(
            torch.where(low | high, bounded, loss),
            sequence_metrics(log_ratio, selected, row_log_ratio, low=low, high=high),
        )


def _with_gradient_of(logp: Tensor, value: Tensor) -> Tensor:
    """Return `value` with the gradient of logp times `value`, i.e. value * exp(logp - sg[logp])."""
    return value + value * (logp - logp.detach())
