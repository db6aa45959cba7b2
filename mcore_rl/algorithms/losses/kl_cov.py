"""KL-Cov: a KL penalty on the tokens with the highest covariance between advantage and log-probability.

    cov_t = (A_t - mean A) (logp_t - mean logp)                  means over all trained tokens of the update
    I     = the cov_ratio N tokens with the highest cov_t
    L_t   = -A_t exp(logp_t - old_logp_t)  +  kl_coef |logp_t - old_logp_t|  for t in I

Source: arXiv 2505.22617, section 4.2 (KL-Cov): cov_ratio 2e-3 and kl_coef 1 for the 7B model. The authors' code
estimates KL(old || policy) by the absolute log ratio. There is no clip.
Shapes: any one shape for all inputs and the loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mcore_rl.algorithms.interface import Needs, PolicyLossInputs, PolicyLossResult, masked
from mcore_rl.algorithms.losses.clip_cov import check_share, share_of
from mcore_rl.algorithms.losses.surrogate import SECTION, bounded_exp, ratio_inputs, ratio_metrics
from mcore_rl.algorithms.selection import chosen_tokens, covariance_moments, covariances
from mcore_rl.errors import ConfigError


@dataclass(frozen=True)
class KLCov:
    """KL-Cov loss. cov_ratio: share of the trained tokens to choose, at least one token. kl_coef: coefficient of the
    penalty, per nat. The gradient of the penalty is 0 while the policy equals the old one, that is in the first update
    of a batch.

    Metrics: ratio_metrics, and chosen_fraction.
    """

    needs: ClassVar[Needs] = Needs(advantages=True, old_logp=True, selection=True)

    cov_ratio: float = 2e-3
    kl_coef: float = 1.0

    def __post_init__(self) -> None:
        check_share(self.cov_ratio)
        if not 0 <= self.kl_coef < math.inf:
            raise ConfigError(f"{SECTION}.kl_coef={self.kl_coef} must not be negative")

    def moments(self, inputs: PolicyLossInputs) -> Tensor:
        return covariance_moments(inputs)

    def scores(self, inputs: PolicyLossInputs, moments: Tensor, keys: Tensor) -> Tensor:
        return covariances(inputs, moments)

    def count(self, num_tokens: int) -> int:
        return share_of(num_tokens, self.cov_ratio)

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossResult:
        selected, log_ratio, advantages = ratio_inputs(inputs)
        chosen = chosen_tokens(self, inputs)
        loss = -advantages * bounded_exp(log_ratio)
        penalty = masked(self.kl_coef * log_ratio.abs(), chosen)
        # The loss has no clip, so its clip fractions are 0.
        metrics = ratio_metrics(log_ratio.detach(), selected, low=None, high=None, chosen_fraction=chosen)
        return PolicyLossResult(loss + penalty, metrics)
