"""Losses that attenuate the gradient smoothly as the policy moves away, instead of clipping it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from mcore_rl.algorithms.interface import Needs, PolicyLossInputs, PolicyLossResult, masked
from mcore_rl.algorithms.losses.sequences import sequence_metrics
from mcore_rl.algorithms.losses.surrogate import (
    MAX_LOG_RATIO,
    anchored_needs,
    bounded_exp,
    check_anchor,
    check_positive,
    ratio_inputs,
    ratio_metrics,
)


@dataclass(frozen=True)
class SAPO:
    """SAPO: a sigmoid gate on each token's ratio instead of a clip.

        r   = exp(logp - old_logp)                                          ratio to the old policy
        f   = (4 / tau) sigmoid(tau (r - 1)),    tau = tau_pos if A > 0, else tau_neg
        L   = -A f

    The gradient of f with respect to r is 4 p (1 - p) with p = sigmoid(tau (r - 1)): 1 at r = 1, and less on both
    sides. A larger tau attenuates more.

    tau_pos, tau_neg: temperatures for positive and for other advantages.

    Metrics: ratio_metrics without clip fractions, and gate_weight, the mean of 4 p (1 - p).

    Source: arXiv 2511.20347, equations 5 and 6; temperatures 1.0 and 1.05: section 5.1. The paper aggregates by
    seq-mean-token-mean.
    Shapes: any one shape for all inputs and the loss.
    """

    needs: ClassVar[Needs] = Needs(advantages=True, old_logp=True)

    tau_pos: float = 1.0
    tau_neg: float = 1.05

    def __post_init__(self) -> None:
        check_positive(tau_pos=self.tau_pos, tau_neg=self.tau_neg)

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossResult:
        selected, log_ratio, advantages = ratio_inputs(inputs)
        tau = torch.full_like(log_ratio, self.tau_neg).masked_fill(advantages > 0, self.tau_pos)
        gate = torch.sigmoid(tau * (bounded_exp(log_ratio) - 1))
        loss = -advantages * gate * (4 / tau)
        with torch.no_grad():
            weight = masked(4 * gate * (1 - gate), selected)
        return PolicyLossResult(
            loss, ratio_metrics(log_ratio.detach(), selected, low=None, high=None, gate_weight=weight)
        )


@dataclass(frozen=True)
class VESPO:
    """VESPO: a gamma-shaped weight of each response's whole importance ratio, without normalization by its length.

        W   = exp(sum_t (logp_t - rollout_logp_t))      over the response; anchor=old: old_logp instead
        phi = W^k exp(lambda (1 - W)),                  k_pos, lambda_pos if A >= 0; k_neg, lambda_neg if A < 0
        L_t = -sg[phi] A_t logp_t                       sg: stop-gradient

    phi is 1 at W = 1, and falls towards 0 for large W and for W near 0.

    anchor: denominator of W. In the paper it is the behavior policy: the engine at sampling (rollout). With old, it is
    the trainer's policy before the first update, so W does not contain the difference between engine and trainer.
    The log of W is limited to 20 nats.

    Metrics: sequence_metrics of W without clip fractions, and gate_weight, the mean of phi over tokens.

    Source: arXiv 2602.10693, section 3.4 (kernel); the defaults are those of the authors' code. The authors aggregate
    by token-mean.
    Shapes: [B, T], one whole response per row.
    """

    k_pos: float = 2.0
    lambda_pos: float = 3.0
    k_neg: float = 3.0
    lambda_neg: float = 2.0
    anchor: str = "rollout"

    def __post_init__(self) -> None:
        check_positive(k_pos=self.k_pos, lambda_pos=self.lambda_pos, k_neg=self.k_neg, lambda_neg=self.lambda_neg)
        check_anchor(self.anchor)

    @property
    def needs(self) -> Needs:
        return anchored_needs(self.anchor, whole_sequence=True)

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossResult:
        selected, log_ratio, advantages = ratio_inputs(inputs, self.anchor)
        log_ratio = log_ratio.detach()
        row_log_ratio = log_ratio.sum(-1, dtype=torch.float64)
        exponent = row_log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        above_one = torch.expm1(exponent)
        positive = (self.k_pos * exponent - self.lambda_pos * above_one).exp()
        negative = (self.k_neg * exponent - self.lambda_neg * above_one).exp()
        weight = torch.where(advantages >= 0, positive[:, None], negative[:, None]).to(log_ratio.dtype)
        weight = masked(weight, selected)
        loss = -weight * advantages * masked(inputs.logp, selected)
        unclipped = torch.zeros_like(selected)
        return PolicyLossResult(
            loss,
            sequence_metrics(log_ratio, selected, row_log_ratio, low=unclipped, high=unclipped, gate_weight=weight),
        )
