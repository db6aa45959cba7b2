"""Losses with a quadratic penalty on the log ratio."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mcore_rl.algorithms.interface import Needs, PolicyLossInputs, PolicyLossResult, masked
from mcore_rl.algorithms.losses.surrogate import SECTION, anchored_needs, check_anchor, ratio_inputs, ratio_metrics
from mcore_rl.errors import ConfigError


@dataclass(frozen=True)
class DRO:
    """DRO: the policy gradient with a quadratic penalty on the log ratio instead of an importance weight.

        d = logp - rollout_logp                         log ratio to the engine's policy; anchor=old: to the old policy
        L = -A logp + (beta / 2) d^2

    The loss needs no importance weight for tokens of another policy: up to terms without gradient, it is the squared
    error (A - beta d)^2 / (2 beta).

    beta: weight of the penalty, advantage per nat. anchor: second policy of d: the engine at sampling (rollout), or the
    trainer's policy before the first update of the batch (old).

    Metrics: ratio_metrics without clip fractions, and penalty, the mean of (beta / 2) d^2.

    Source: arXiv 2405.19107 (DRO, with one log ratio per response to a fixed reference policy, and a learned value);
    per token, to the sampling policy and with an estimated advantage: documentation of Tinker, "DRO", whose example
    has the beta that is the default here. The Tinker form sums over tokens (seq-mean-token-sum).
    Shapes: any one shape for all inputs and the loss.
    """

    beta: float = 0.05
    anchor: str = "rollout"

    def __post_init__(self) -> None:
        check_anchor(self.anchor)
        if not 0 <= self.beta < math.inf:
            raise ConfigError(f"{SECTION}.beta={self.beta} must be finite and at least 0")

    @property
    def needs(self) -> Needs:
        return anchored_needs(self.anchor)

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossResult:
        selected, log_ratio, advantages = ratio_inputs(inputs, self.anchor)
        penalty = self.beta / 2 * log_ratio.square()
        loss = -advantages * masked(inputs.logp, selected) + penalty
        metrics = ratio_metrics(log_ratio.detach(), selected, low=None, high=None, penalty=penalty.detach())
        return PolicyLossResult(loss, metrics)
