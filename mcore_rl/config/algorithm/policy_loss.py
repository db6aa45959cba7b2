"""Section `algorithm.policy_loss`, and the names of policy losses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mcore_rl.config.fields import setting

# Copies of the registries' names in algorithms/, which imports torch; a test checks that they are equal.
SUPERVISED = "sft"
"""Loss name of supervised training, which generates no responses."""
PREFERENCE = "dpo"
"""Loss name of training on pairs of responses, which generates no responses."""
SCORES = "reward_model"
"""Loss name of training a reward model on pairs of responses, which generates no responses."""
SAMPLED_LOSSES = (
    *("ppo_clip", "gspo", "gmpo", "clip_cov", "kl_cov", "cispo", "sapo", "dppo_tv", "dppo_kl", "vespo", "dro", "fipo"),
    *("real", "decoupled_ppo", "reinforce"),
)
"""Losses of sampled responses, with advantages."""
POLICY_LOSSES = (*SAMPLED_LOSSES, SUPERVISED, PREFERENCE, SCORES)


@dataclass
class PolicyLossConfig:
    """Options of the policy loss. null selects the loss's default; an option that the loss does not have is
    rejected."""

    name: str = setting("ppo_clip", choices=POLICY_LOSSES, function=True)
    """Policy loss: a built-in name, `module_or_file.py:function`, or sft: supervised training on data.answer_key (warm
    start) without rollout. trainer.objective=sft, dpo and reward_model set the loss of the same name. For conversations
    and a validation loss, set trainer.objective=sft instead of this key."""
    clip_low: float | None = setting(None, minimum=0)
    """Lower clip range: probability ratios below 1 - clip_low get no gradient (gmpo: log ratios below -clip_low;
    dppo_tv, dppo_kl: less probable tokens with a divergence above clip_low)."""
    clip_high: float | None = setting(None, minimum=0)
    """Upper clip range: probability ratios above 1 + clip_high get no gradient (gmpo: log ratios above clip_high;
    dppo_tv, dppo_kl: more probable tokens with a divergence above clip_high)."""
    dual_clip: float | None = setting(None, above=1)
    """Upper bound of the ratio for negative advantages."""
    cov_ratio: float | None = setting(None, above=0, maximum=1)
    """Fraction of tokens that clip_cov and kl_cov select."""
    cov_low: float | None = None
    """Lower bound of the covariance of tokens that clip_cov selects."""
    cov_high: float | None = None
    """Upper bound of the covariance of tokens that clip_cov selects."""
    kl_coef: float | None = setting(None, minimum=0)
    """Weight of the KL term of the tokens that kl_cov selects."""
    anchor: str | None = setting(None, choices=("old", "rollout"))
    """Policy in the denominator of the ratio of cispo, dppo_tv, dppo_kl, vespo and dro: the trainer's before the first
    update of a batch (old), or the engine's at sampling (rollout), which needs no pass for old log-probabilities."""
    mask_anchor: str | None = setting(None, choices=("old", "rollout"))
    """Policy at the center of the trust region of dppo_tv and dppo_kl; null: anchor, to which the ratio refers."""
    ratio_cap: float | None = setting(None, above=1)
    """Upper bound of the ratio with which dppo_tv and dppo_kl weigh the gradient."""
    tau_pos: float | None = setting(None, above=0)
    """Temperature of the gate of sapo for tokens with a positive advantage."""
    tau_neg: float | None = setting(None, above=0)
    """Temperature of the gate of sapo for the other tokens."""
    k_pos: float | None = setting(None, above=0)
    """Exponent k of the weight of vespo for advantages that are not negative."""
    k_neg: float | None = setting(None, above=0)
    """Exponent k of the weight of vespo for negative advantages."""
    lambda_pos: float | None = setting(None, above=0)
    """Decay lambda of the weight of vespo for advantages that are not negative."""
    lambda_neg: float | None = setting(None, above=0)
    """Decay lambda of the weight of vespo for negative advantages."""
    beta: float | None = setting(None, minimum=0)
    """Weight of the quadratic penalty of dro, advantage per nat."""
    decay_tokens: float | None = setting(None, above=0, unit="tokens")
    """Distance after which a later token's log ratio counts half in the weights of fipo."""
    influence_low: float | None = setting(None, minimum=0, below=1)
    """Lower bound of the weights of fipo: 1 - influence_low."""
    influence_high: float | None = setting(None, minimum=0)
    """Upper bound of the weights of fipo: 1 + influence_high."""
    safety_ratio: float | None = setting(None, above=0)
    """Probability ratio above which fipo limits the weight of a token with a negative advantage to 0.8 to 1."""
    tau: float | None = setting(None, above=0, unit="nats")
    """Temperature of real, by which it divides the scores of responses."""
    prox: str | None = setting(None, choices=("recomputed", "loglinear", "metrics"))
    """Source of the proximal policy of decoupled_ppo."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Additional keyword arguments of a user's function."""
