"""Losses that treat the tokens with a high covariance between advantage and log-probability differently."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mcore_rl.algorithms.interface import Needs, PolicyLossInputs, PolicyLossResult, masked
from mcore_rl.algorithms.losses.surrogate import (
    SECTION,
    bounded_exp,
    check_bounds,
    clipped_surrogate,
    ratio_inputs,
    ratio_metrics,
    split_by_sign,
)
from mcore_rl.algorithms.selection import chosen_tokens, random_scores
from mcore_rl.errors import ConfigError


class CovarianceLoss:
    """Base class of losses that choose a share of the tokens by their covariance (see selection.SelectiveLoss)."""

    needs: ClassVar[Needs] = Needs(advantages=True, old_logp=True, selection=True)

    cov_ratio: float

    def check_share(self) -> None:
        """Check that 0 < cov_ratio <= 1. Raises: ConfigError."""
        if not 0 < self.cov_ratio <= 1:
            raise ConfigError(f"{SECTION}.cov_ratio={self.cov_ratio} must be greater than 0 and at most 1")

    @torch.no_grad()
    def moments(self, inputs: PolicyLossInputs) -> Tensor:
        """Number of trained tokens, sum of their advantages, sum of their log-probabilities; float64 [3]."""
        assert inputs.advantages is not None
        selected = inputs.mask > 0
        summed = (inputs.advantages, inputs.logp)
        sums = [torch.where(selected, tensor, 0.0).sum(dtype=torch.float64) for tensor in summed]
        return torch.stack([selected.sum().double(), *sums])

    def count(self, num_tokens: int) -> int:
        """Return floor(cov_ratio N), but at least one token if there is any."""
        return min(num_tokens, max(1, int(self.cov_ratio * num_tokens)))


@torch.no_grad()
def covariances(inputs: PolicyLossInputs, moments: Tensor) -> Tensor:
    """Return the per-token covariance terms of advantage and log-probability, (A - mean A) (logp - mean logp), with the
    means of the whole update; -inf for tokens that are not trained. float32, computed in float64.

    Source: arXiv 2505.22617, section 4.2.
    """
    assert inputs.advantages is not None
    count, advantages, logp = moments.unbind()
    product = (inputs.advantages.double() - advantages / count) * (inputs.logp.double() - logp / count)
    return product.float().masked_fill(~(inputs.mask > 0), -torch.inf)


@dataclass(frozen=True)
class ClipCov(CovarianceLoss):
    """Clip-Cov: a few random tokens with high covariance between advantage and log-probability lose their gradient.

        cov_t = (A_t - mean A) (logp_t - mean logp)                  means over all trained tokens of the update
        I     = cov_ratio N random tokens with cov_low < cov_t < cov_high that PPO's clip does not affect
        L_t   = PPO's clipped surrogate, with the ratio to the old policy, and 0 for t in I

    clip_low, clip_high: see ppo_clip. cov_ratio: share of the trained tokens to choose, at least one token.
    cov_low, cov_high: range of eligible covariances, in nats times advantage.

    Metrics: ratio_metrics, and chosen_fraction.

    Source: arXiv 2505.22617, section 4.2 (Clip-Cov): bounds 1 and 5, cov_ratio 2e-4. The authors' code also applies
    PPO's clip and excludes clipped tokens from I.
    Shapes: any one shape for all inputs and the loss.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    cov_ratio: float = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0

    def __post_init__(self) -> None:
        check_bounds(self.clip_low, self.clip_high)
        self.check_share()
        if not self.cov_low < self.cov_high:
            raise ConfigError(f"{SECTION}.cov_low={self.cov_low} must be less than {SECTION}.cov_high={self.cov_high}")

    @torch.no_grad()
    def scores(self, inputs: PolicyLossInputs, moments: Tensor, keys: Tensor) -> Tensor:
        selected, log_ratio, advantages = ratio_inputs(inputs)
        covariance = covariances(inputs, moments)
        clipped = clipped_surrogate(log_ratio, advantages, self.clip_low, self.clip_high).clipped
        # Clipped tokens have no gradient that the selection could remove.
        eligible = (covariance > self.cov_low) & (covariance < self.cov_high) & ~clipped & selected
        return random_scores(keys).masked_fill(~eligible, -torch.inf)

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossResult:
        selected, log_ratio, advantages = ratio_inputs(inputs)
        chosen = chosen_tokens(self, inputs)
        result = clipped_surrogate(log_ratio, advantages, self.clip_low, self.clip_high)
        metrics = ratio_metrics(
            log_ratio, selected, **split_by_sign(result.clipped, advantages), chosen_fraction=chosen
        )
        # masked_fill also removes the gradient of the chosen tokens.
        return PolicyLossResult(result.loss.masked_fill(chosen, 0.0), metrics)


@dataclass(frozen=True)
class KLCov(CovarianceLoss):
    """KL-Cov: a KL penalty on the tokens with the highest covariance between advantage and log-probability.

        cov_t = (A_t - mean A) (logp_t - mean logp)                  means over all trained tokens of the update
        I     = the cov_ratio N tokens with the highest cov_t
        L_t   = -A_t exp(logp_t - old_logp_t)  +  kl_coef |logp_t - old_logp_t|  for t in I;   ratio to the old policy

    cov_ratio: share of the trained tokens to choose, at least one token. kl_coef: coefficient of the
    penalty, per nat. The gradient of the penalty is 0 while the policy equals the old one, that is in the first update
    of a batch.

    Metrics: ratio_metrics, and chosen_fraction.

    Source: arXiv 2505.22617, section 4.2 (KL-Cov): cov_ratio 2e-3 and kl_coef 1 for the 7B model. The authors' code
    estimates KL(old || policy) by the absolute log ratio. There is no clip.
    Shapes: any one shape for all inputs and the loss.
    """

    cov_ratio: float = 2e-3
    kl_coef: float = 1.0

    def __post_init__(self) -> None:
        self.check_share()
        if not 0 <= self.kl_coef < math.inf:
            raise ConfigError(f"{SECTION}.kl_coef={self.kl_coef} must be finite and at least 0")

    def scores(self, inputs: PolicyLossInputs, moments: Tensor, keys: Tensor) -> Tensor:
        return covariances(inputs, moments)

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossResult:
        selected, log_ratio, advantages = ratio_inputs(inputs)
        chosen = chosen_tokens(self, inputs)
        loss = -advantages * bounded_exp(log_ratio)
        penalty = masked(self.kl_coef * log_ratio.abs(), chosen)
        # The loss has no clip, so its clip fractions are 0.
        metrics = ratio_metrics(log_ratio.detach(), selected, low=None, high=None, chosen_fraction=chosen)
        return PolicyLossResult(loss + penalty, metrics)
