"""Terms that are added to the policy loss of each token:

    - entropy_coefficient H                               H: entropy of the policy's distribution
    + kl.in_loss k                                        k: estimator kl.loss_kind of KL(policy || reference)
    + kl.in_loss r k,    r = exp(logp - old_logp)         with kl.unbiased
    + drift_penalty.coefficient d^2,                      d = logp - rollout_logp with anchor rollout,
                                                              logp - old_logp with anchor old

Terms with a reduction of their own, beside algorithm.loss_aggregation:

    observation_coefficient 1/S sum_i v_i/|O_i| sum_{t in O_i} -log p(y_it)

    O_i: tokens of response i that were not sampled, before its last trained token: results of tools, messages of users
         or an environment, and the tokens of the chat template around them, without placeholders of images. p: the
         model's distribution at temperature 1. v_i: weight of the response's source in
         algorithm.per_source, or 1. S: responses of the update that are trained, without those with v_i = 0. A response
         without such tokens adds 0; whether its advantage is 0 does not matter.

Tokens are samples of the old policy. The plain KL term is therefore unbiased only while the policy equals the old one,
and even then the gradients of k1 and low_var are biased, because they treat the tokens as fixed. With the ratio r,
through which the gradient flows too, the mean of r k over tokens of the old policy is KL(policy || reference), in value
and gradient, for k1 and low_var. The old policy is the trainer's or, with algorithm.old_logp=rollout, the engine's.

The drift penalty pulls the policy back to the policy that sampled. KL term and drift penalty have a gradient for every
token, even if the policy loss clips, masks or corrects it.

Source: unbiased KL: DeepSeek-V3.2, arXiv 2512.02556, equation 7 (low_var); drift penalty: Kimi K2.5, arXiv 2602.02276,
the term tau (log ratio)^2 of equation 1; cross-entropy of observations: ECHO, arXiv 2605.24517, whose example of
the coefficient is 0.05. Of that paper only the abstract and summaries were available; the reduction is the one of rLLM
(pull request 688). The paper leaves out tokens of warnings that the harness adds, which cannot be told apart here.
"""

from __future__ import annotations

from torch import Tensor

from mcore_rl.algorithms.interface import PolicyLossInputs
from mcore_rl.algorithms.kl import kl_penalty
from mcore_rl.algorithms.losses.surrogate import bounded_exp
from mcore_rl.config.algorithm import AlgorithmConfig
from mcore_rl.types import Mean, Metric


def terms_need_old_logp(algorithm: AlgorithmConfig) -> bool:
    """Return True if a term reads the old policy."""
    penalty = algorithm.drift_penalty
    return algorithm.kl.unbiased or (penalty.coefficient > 0 and penalty.anchor == "old")


def add_terms(
    per_token: Tensor,
    algorithm: AlgorithmConfig,
    inputs: PolicyLossInputs,
    *,
    entropy: Tensor,
    entropy_coefficient: float,
    ref_logp: Tensor | None,
) -> tuple[Tensor, dict[str, Metric]]:
    """Add the configured terms to a loss per token. Returns the sum and the means of the KL term and of d^2.

    Shapes: all [N], trained tokens only. Units: nats.
    ref_logp: log-probabilities of the reference; needed if kl.in_loss is above 0.
    """
    found: dict[str, Tensor] = {}
    if entropy_coefficient:
        per_token = per_token - entropy_coefficient * entropy
    if algorithm.kl.in_loss:
        assert ref_logp is not None
        kl = kl_penalty(inputs.logp, ref_logp, algorithm.kl.loss_kind)
        if algorithm.kl.unbiased:
            assert inputs.old_logp is not None
            kl = bounded_exp(inputs.logp - inputs.old_logp) * kl
        per_token = per_token + algorithm.kl.in_loss * kl
        found["actor/kl_reference"] = kl
    penalty = algorithm.drift_penalty
    if penalty.coefficient:
        anchor = inputs.old_logp if penalty.anchor == "old" else inputs.rollout_logp
        assert anchor is not None
        squared = (inputs.logp - anchor).square()
        per_token = per_token + penalty.coefficient * squared
        found["actor/drift_squared"] = squared
    return per_token, {
        name: Mean(float(values.detach().double().sum()), values.numel()) for name, values in found.items()
    }
