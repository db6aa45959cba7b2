"""Clip-Cov: a few random tokens with high covariance between advantage and log-probability lose their gradient.

    cov_t = (A_t - mean A) (logp_t - mean logp)                  means over all trained tokens of the update
    I     = cov_ratio N random tokens with cov_low < cov_t < cov_high that PPO's clip does not affect
    L_t   = PPO's clipped surrogate, and 0 for t in I

Source: arXiv 2505.22617, section 4.2 (Clip-Cov): bounds 1 and 5, cov_ratio 2e-4. The authors' code also applies PPO's
clip and excludes clipped tokens from I.
Shapes: any one shape for all inputs and the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mcore_rl.algorithms.interface import Needs, PolicyLossInputs, PolicyLossResult
from mcore_rl.algorithms.losses.surrogate import (
    SECTION,
    check_bounds,
    clipped_surrogate,
    ratio_inputs,
    ratio_metrics,
    split_by_sign,
)
from mcore_rl.algorithms.selection import chosen_tokens, covariance_moments, covariances, random_scores
from mcore_rl.errors import ConfigError


@dataclass(frozen=True)
class ClipCov:
    """Clip-Cov loss. clip_low, clip_high: see ppo_clip. cov_ratio: share of the trained tokens to choose, at least one
    token. cov_low, cov_high: range of eligible covariances, in nats times advantage.

    Metrics: ratio_metrics, and chosen_fraction.
    """

    needs: ClassVar[Needs] = Needs(advantages=True, old_logp=True, selection=True)

    clip_low: float = 0.2
    clip_high: float = 0.2
    cov_ratio: float = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0

    def __post_init__(self) -> None:
        check_bounds(self.clip_low, self.clip_high)
        check_share(self.cov_ratio)
        if not self.cov_low < self.cov_high:
            raise ConfigError(f"{SECTION}.cov_low={self.cov_low} must be less than {SECTION}.cov_high={self.cov_high}")

    def moments(self, inputs: PolicyLossInputs) -> Tensor:
        return covariance_moments(inputs)

    @torch.no_grad()
    def scores(self, inputs: PolicyLossInputs, moments: Tensor, keys: Tensor) -> Tensor:
        assert inputs.old_logp is not None
        assert inputs.advantages is not None
        covariance = covariances(inputs, moments)
        clipped = clipped_surrogate(
            inputs.logp - inputs.old_logp, inputs.advantages, self.clip_low, self.clip_high
        ).clipped
        # Clipped tokens have no gradient that the selection could remove.
        eligible = (covariance > self.cov_low) & (covariance < self.cov_high) & ~clipped & (inputs.mask > 0)
        return random_scores(keys).masked_fill(~eligible, -torch.inf)

    def count(self, num_tokens: int) -> int:
        return share_of(num_tokens, self.cov_ratio)

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossResult:
        selected, log_ratio, advantages = ratio_inputs(inputs)
        chosen = chosen_tokens(self, inputs)
        result = clipped_surrogate(log_ratio, advantages, self.clip_low, self.clip_high)
        metrics = ratio_metrics(
            log_ratio, selected, **split_by_sign(result.clipped, advantages), chosen_fraction=chosen
        )
        # masked_fill also removes the gradient of the chosen tokens.
        return PolicyLossResult(result.loss.masked_fill(chosen, 0.0), metrics)


def check_share(cov_ratio: float) -> None:
    """Check that 0 < cov_ratio <= 1. Raises: ConfigError."""
    if not 0 < cov_ratio <= 1:
        raise ConfigError(f"{SECTION}.cov_ratio={cov_ratio} must be greater than 0 and at most 1")


def share_of(num_tokens: int, cov_ratio: float) -> int:
    """Return floor(cov_ratio N), but at least one token if there is any."""
    return min(num_tokens, max(1, int(cov_ratio * num_tokens)))
