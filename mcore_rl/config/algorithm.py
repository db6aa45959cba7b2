"""Section `algorithm`: advantages, losses, corrections, selection of groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mcore_rl.config.fields import check_domains, setting
from mcore_rl.errors import ConfigError

# Copies of the registries' names in algorithms/, which imports torch; a test checks that they are equal.
GROUP_ADVANTAGES = ("grpo", "grpo_passk", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg")
"""Estimators that compare the responses of a group with each other."""
COMPARING_ADVANTAGES = (*GROUP_ADVANTAGES, "remax")
"""Estimators that compare samples of a prompt with each other or with a greedy response."""
ADVANTAGES = ("gae", "reinforce_plus_plus", *COMPARING_ADVANTAGES)
SUPERVISED = "sft"
"""Loss name of supervised training, which generates no responses."""
POLICY_LOSSES = (
    *("ppo_clip", "gspo", "gmpo", "clip_cov", "kl_cov", "cispo", "decoupled_ppo", "reinforce"),
    SUPERVISED,
)
LOSS_AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KL_KINDS = ("k1", "abs", "mse", "low_var", "k2", "k3")


@dataclass
class PolicyLossConfig:
    """Options of the policy loss. null selects the loss's default; an option that the loss does not have is
    rejected."""

    name: str = setting("ppo_clip", choices=POLICY_LOSSES, function=True)
    """Policy loss: a built-in name, `module_or_file.py:function`, or sft: supervised training on data.answer_key (warm
    start) without rollout."""
    clip_low: float | None = setting(None, minimum=0)
    """Lower clip range: probability ratios below 1 - clip_low get no gradient (gmpo: log ratios below -clip_low)."""
    clip_high: float | None = setting(None, minimum=0)
    """Upper clip range: probability ratios above 1 + clip_high get no gradient (gmpo: log ratios above clip_high)."""
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
    prox: str | None = setting(None, choices=("recomputed", "loglinear", "metrics"))
    """Source of the proximal policy of decoupled_ppo."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Additional keyword arguments of a user's function."""


@dataclass
class CorrectionConfig:
    """Importance correction for the difference between the engine, which samples, and the trainer, which computes the
    same policy with slightly different results. Each token's loss is multiplied by exp(old_logp - rollout_logp), within
    bounds."""

    kind: str = setting("auto", choices=("auto", "none", "truncate", "mask"))
    """Treatment of weights outside the bounds: truncate clips them, mask sets them to 0; none: no correction. auto:
    truncate with rollout.quantization, if the policy loss supports corrections; else none."""
    level: str = setting("token", choices=("token", "sequence", "geometric"))
    """Unit of the weights: each token, a response's product (sequence), or a response's geometric mean (geometric)."""
    low: float | None = setting(None, minimum=0)
    """Lower bound of the weights; null: 0 for truncate, 1 / high for mask."""
    high: float = setting(2.0, above=0)
    """Upper bound of the weights."""
    apply: bool = True
    """Apply the correction to the loss; false: only report its metrics."""

    def __post_init__(self) -> None:
        section = "algorithm.correction"
        check_domains(self, f"{section}.")
        if not 0 <= self.bounds[0] < self.high:
            raise ConfigError(
                f"{section}.low={self.bounds[0]:g} must be at least 0 and less than {section}.high={self.high:g}"
            )

    @property
    def bounds(self) -> tuple[float, float]:
        """Lower and upper bound within which weights are unchanged."""
        if self.low is not None:
            return self.low, self.high
        # The default bounds of a mask are symmetric in the logarithm of the weight.
        return (1 / self.high if self.kind == "mask" else 0.0), self.high


@dataclass
class KLConfig:
    """KL terms that keep the policy close to the reference. A reference exists if a coefficient is above 0."""

    in_loss: float = setting(0.0, minimum=0)
    """Coefficient of the KL term in the policy loss."""
    loss_kind: str = setting("low_var", choices=KL_KINDS)
    """Per-token estimator of the KL in the loss; mse = k2, low_var = k3. The gradient of k1 has mean 0."""
    in_reward: float = setting(0.0, minimum=0)
    """Coefficient of the KL that is subtracted from the rewards; the initial value with an adaptive controller."""
    reward_kind: str = setting("k1", choices=KL_KINDS)
    """Per-token estimator of the KL in the rewards; see algorithm.kl.loss_kind."""
    controller: str = setting("fixed", choices=("fixed", "adaptive"))
    """Controller of in_reward; adaptive adjusts it such that the KL per token approaches `target`."""
    target: float | None = setting(None, above=0, unit="nats")
    """Target of the adaptive controller: KL per trained token, as estimated by reward_kind."""
    horizon: int | None = setting(None, minimum=1, unit="responses")
    """Number of responses over which the adaptive controller changes the coefficient by at most 20 %."""


@dataclass
class DynamicSamplingConfig:
    """Dynamic sampling: groups in which `metric` is the same for all samples are dropped and replaced, with up to
    max_batches batches per step."""

    enable: bool = False
    """Drop and replace groups whose samples are all equal in `metric`."""
    max_batches: int = setting(10, minimum=1, unit="batches")
    """Maximum number of prompt batches that a step samples."""
    metric: str = setting("accuracy", choices=("accuracy", "reward"))
    """Quantity that is compared within a group."""


@dataclass
class AlgorithmConfig:
    """Advantages, losses, KL terms and selection of groups."""

    advantage: str = setting("grpo", choices=ADVANTAGES, function=True)
    """Advantage estimator, by name or as `module_or_file.py:function`; docs/algorithms.md contains the formulas."""
    normalize_by_std: bool | None = None
    """Divide the advantages of grpo and grpo_passk by the group's standard deviation; null: true."""
    gamma: float | None = setting(None, minimum=0, maximum=1)
    """Discount per trained token for gae and reinforce_plus_plus; null: 1."""
    lam: float | None = setting(None, minimum=0, maximum=1)
    """Lambda of gae; null: 1."""
    whiten: bool | None = None
    """Whiten the advantages of gae; null: true."""
    advantage_kwargs: dict[str, Any] = field(default_factory=dict)
    """Additional keyword arguments of a user's estimator."""
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    loss_aggregation: str = setting("token-mean", choices=LOSS_AGGREGATIONS)
    """Reduction of per-token losses to the loss of an update."""
    entropy_coefficient: float = 0.0
    """Coefficient of the entropy bonus in the loss; 0: none."""
    kl: KLConfig = field(default_factory=KLConfig)
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    overlong_filtering: bool = False
    """Exclude responses that reached their token limit from training; they still count in their group's baseline."""
    filter: str | None = setting(None, function=True)
    """`module_or_file.py:function`, called as f(rewards=, accuracies=, group_ids=, lengths=, clipped=). It returns bool
    [B]: the responses to train."""


def is_supervised(algorithm: AlgorithmConfig) -> bool:
    """Return True if target texts are trained on and nothing is sampled."""
    return algorithm.policy_loss.name == SUPERVISED
