"""KL-Cov: the tokens of highest covariance between advantage and log-probability are held back by a KL penalty.

    cov_t = (A_t - mean A) (logp_t - mean logp)                  means over all trained tokens of the update
    I     = the cov_ratio N tokens of highest cov_t
    L_t   = -A_t exp(logp_t - old_logp_t)  +  kl_coef |logp_t - old_logp_t|  for t in I

Source: arXiv 2505.22617, section 4.2 (KL-Cov); a share of 2e-3 and a coefficient of 1 for its 7B model; the absolute
log ratio as the estimate of KL(old || policy) in the authors' code. There is no clip.
Shapes: any one shape for all inputs and the loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mcore_rl.algorithms.interface import Needs, PolicyLossInputs, PolicyLossResult, trained
from mcore_rl.algorithms.losses.clip_cov import check_share, share_of
from mcore_rl.algorithms.losses.surrogate import SECTION, bounded_exp, ratio_metrics
from mcore_rl.algorithms.selection import choose_alone, covariance_moments, covariances
from mcore_rl.errors import ConfigError


@dataclass(frozen=True)
class KLCov:
    """cov_ratio: share of the trained tokens to choose, at least one of them. kl_coef: of the penalty, per nat.

    Metrics: those of ratio_metrics, and chosen_fraction. Where the policy is still the old one the penalty's gradient
    is 0: it acts from the second update of a batch on.
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
        assert inputs.old_logp is not None
        assert inputs.advantages is not None
        selected = inputs.mask > 0
        chosen = choose_alone(self, inputs)
        log_ratio = trained(inputs.logp - inputs.old_logp, selected)
        loss = -trained(inputs.advantages, selected) * bounded_exp(log_ratio)
        penalty = trained(self.kl_coef * log_ratio.abs(), chosen)
        metrics = ratio_metrics(log_ratio.detach(), selected, low=None, high=None, chosen_fraction=chosen)
        return PolicyLossResult(loss + penalty, metrics)
