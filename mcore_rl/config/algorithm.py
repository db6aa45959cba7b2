"""The section `algorithm`: advantages, losses, corrections, which groups are trained on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mcore_rl.config.fields import check_domains, setting
from mcore_rl.errors import ConfigError

# Names of the registries in algorithms/, which imports torch; a test holds them equal.
GROUP_ADVANTAGES = ("grpo", "grpo_passk", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg")
"""Estimators that compare the responses of a group with one another."""
COMPARING_ADVANTAGES = (*GROUP_ADVANTAGES, "remax")
"""Estimators that compare samples of a prompt: with one another, or with a greedy one."""
ADVANTAGES = ("gae", "reinforce_plus_plus", *COMPARING_ADVANTAGES)
SUPERVISED = "sft"
"""The loss of supervised training, which samples nothing."""
POLICY_LOSSES = (
    *("ppo_clip", "gspo", "gmpo", "clip_cov", "kl_cov", "cispo", "decoupled_ppo", "reinforce"),
    SUPERVISED,
)
LOSS_AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KL_KINDS = ("k1", "abs", "mse", "low_var", "k2", "k3")


@dataclass
class PolicyLossConfig:
    """Options that are null take the loss's own default; one that the named loss does not take is refused."""

    name: str = setting("ppo_clip", choices=POLICY_LOSSES, function=True)
    """ppo_clip | gspo | gmpo | clip_cov | kl_cov | cispo | decoupled_ppo | reinforce; `module_or_file.py:function`; or
    sft: supervised training on data.answer_key (warm start), without rollout."""
    clip_low: float | None = setting(None, minimum=0)
    """How far below 1 the ratio of probabilities may fall and still be learnt from (gmpo: below 0 its logarithm)."""
    clip_high: float | None = setting(None, minimum=0)
    """How far above 1 it may rise (gmpo: above 0 its logarithm)."""
    dual_clip: float | None = setting(None, above=1)
    """Bound of the ratio where the advantage is negative."""
    cov_ratio: float | None = setting(None, above=0, maximum=1)
    """Of clip_cov and kl_cov: share of the tokens that they choose."""
    cov_low: float | None = None
    """Of clip_cov: covariance above which it chooses."""
    cov_high: float | None = None
    """Of clip_cov: covariance below which it chooses."""
    kl_coef: float | None = setting(None, minimum=0)
    """Of kl_cov: weight of the KL of chosen tokens."""
    prox: str | None = setting(None, choices=("recomputed", "loglinear", "metrics"))
    """recomputed | loglinear | metrics: where decoupled_ppo's proximal policy is from."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra keyword arguments of a user's function."""


@dataclass
class CorrectionConfig:
    """Importance correction between the engine, which sampled, and the trainer, which computes the same policy a little
    differently: the loss of every token times exp(old_logp - rollout_logp), within bounds."""

    kind: str = setting("none", choices=("none", "truncate", "mask"))
    """none | truncate: weights are cut to the bounds | mask: a weight out of bounds becomes 0."""
    level: str = setting("token", choices=("token", "sequence", "geometric"))
    """token | sequence: product over a response's tokens | geometric: their geometric mean."""
    low: float | None = setting(None, minimum=0)
    """null: 0 for truncate, 1 / high for mask."""
    high: float = setting(2.0, above=0)
    """The highest weight."""
    apply: bool = True
    """false: only reported."""

    def __post_init__(self) -> None:
        section = "algorithm.correction"
        check_domains(self, f"{section}.")
        if not 0 <= self.bounds[0] < self.high:
            raise ConfigError(
                f"{section}.low={self.bounds[0]:g} must be at least 0 and less than {section}.high={self.high:g}"
            )

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest weight that is left alone."""
        if self.low is not None:
            return self.low, self.high
        return (1 / self.high if self.kind == "mask" else 0.0), self.high


@dataclass
class KLConfig:
    """What keeps the policy near the reference. A reference exists where a coefficient is above 0."""

    in_loss: float = setting(0.0, minimum=0)
    """Coefficient of the KL term of the policy loss."""
    loss_kind: str = setting("low_var", choices=KL_KINDS)
    """k1 | abs | mse (k2) | low_var (k3), estimated per token; the gradient of k1 has mean 0."""
    in_reward: float = setting(0.0, minimum=0)
    """Coefficient of the KL that is taken off the rewards; with an adaptive controller the first one."""
    reward_kind: str = setting("k1", choices=KL_KINDS)
    """As loss_kind."""
    controller: str = setting("fixed", choices=("fixed", "adaptive"))
    """fixed | adaptive: of in_reward. adaptive steers it so that the KL of a token becomes `target`."""
    target: float | None = setting(None, above=0, unit="nats")
    """Of the adaptive controller: nats per trained token, of reward_kind."""
    horizon: int | None = setting(None, minimum=1, unit="responses")
    """Of the adaptive controller: responses; with as many the coefficient moves by up to a fifth."""


@dataclass
class DynamicSamplingConfig:
    """Groups whose samples all have the same `metric` are dropped and refilled, in up to max_batches batches."""

    enable: bool = False
    """Whether groups are dropped."""
    max_batches: int = setting(10, minimum=1, unit="batches")
    """Batches of prompts that a step tries at most."""
    metric: str = setting("accuracy", choices=("accuracy", "reward"))
    """accuracy | reward."""


@dataclass
class AlgorithmConfig:
    advantage: str = setting("grpo", choices=ADVANTAGES, function=True)
    """The estimator, by name or `module_or_file.py:function`; docs/algorithms.md has their formulas."""
    normalize_by_std: bool | None = None
    """Of grpo and grpo_passk; null: their default, true."""
    gamma: float | None = setting(None, minimum=0, maximum=1)
    """Discount per trained token, of gae and reinforce_plus_plus; null: their default, 1."""
    lam: float | None = setting(None, minimum=0, maximum=1)
    """Of gae; null: its default, 1."""
    whiten: bool | None = None
    """Of gae; null: its default, true."""
    advantage_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra keyword arguments of a user's function."""
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    loss_aggregation: str = setting("token-mean", choices=LOSS_AGGREGATIONS)
    """token-mean | seq-mean-token-sum | seq-mean-token-mean | seq-mean-token-sum-norm."""
    entropy_coefficient: float = 0.0
    """Of the entropy that the loss is given as a bonus; 0: none."""
    kl: KLConfig = field(default_factory=KLConfig)
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    overlong_filtering: bool = False
    """Responses that hit their token limit are not trained; they count in their group's baseline."""
    filter: str | None = setting(None, function=True)
    """`module_or_file.py:function` f(rewards=, accuracies=, group_ids=, lengths=, clipped=) -> bool [B]: which
    responses are trained."""


def is_supervised(algorithm: AlgorithmConfig) -> bool:
    """Whether target texts are trained on and nothing is sampled."""
    return algorithm.policy_loss.name == SUPERVISED
