"""The section `algorithm`: advantages, losses, corrections, which groups are trained on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from mcore_rl.errors import ConfigError


@dataclass
class PolicyLossConfig:
    """Options that are null take the loss's own default; one that the named loss does not take is refused."""

    name: str = "ppo_clip"
    """ppo_clip | gspo | gmpo | clip_cov | kl_cov | cispo | decoupled_ppo | reinforce; `module_or_file.py:function`; or
    sft: supervised training on data.answer_key (warm start), without rollout."""
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    cov_ratio: float | None = None
    cov_low: float | None = None
    cov_high: float | None = None
    kl_coef: float | None = None
    prox: str | None = None
    """recomputed | loglinear | metrics: where decoupled_ppo's proximal policy is from."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra keyword arguments of a user's function."""


@dataclass
class CorrectionConfig:
    """Importance correction between the engine, which sampled, and the trainer, which computes the same policy a little
    differently: the loss of every token times exp(old_logp - rollout_logp), within bounds."""

    kind: str = "none"
    """none | truncate: weights are cut to the bounds | mask: a weight out of bounds becomes 0."""
    level: str = "token"
    """token | sequence: product over a response's tokens | geometric: their geometric mean."""
    low: float | None = None
    """null: 0 for truncate, 1 / high for mask."""
    high: float = 2.0
    apply: bool = True
    """false: only reported."""

    def __post_init__(self) -> None:
        section = "algorithm.correction"
        for name, known in (("kind", ("none", "truncate", "mask")), ("level", ("token", "sequence", "geometric"))):
            if getattr(self, name) not in known:
                raise ConfigError(f"{section}.{name}={getattr(self, name)} is not known. Known: {', '.join(known)}.")
        if not 0 < self.high < math.inf:
            raise ConfigError(f"{section}.high={self.high} must be greater than 0")
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

    in_loss: float = 0.0
    """Coefficient of the KL term of the policy loss."""
    loss_kind: str = "low_var"
    """k1 | abs | mse (k2) | low_var (k3), estimated per token; the gradient of k1 has mean 0."""
    in_reward: float = 0.0
    """Coefficient of the KL that is taken off the rewards; with an adaptive controller the first one."""
    reward_kind: str = "k1"
    controller: str = "fixed"
    """fixed | adaptive: of in_reward. adaptive steers it so that the KL of a token becomes `target`."""
    target: float | None = None
    """Of the adaptive controller: nats per trained token, of reward_kind."""
    horizon: int | None = None
    """Of the adaptive controller: responses; with as many the coefficient moves by up to a fifth."""


@dataclass
class DynamicSamplingConfig:
    """Groups whose samples all have the same `metric` are dropped and refilled, in up to max_batches batches."""

    enable: bool = False
    max_batches: int = 10
    metric: str = "accuracy"
    """accuracy | reward."""


@dataclass
class AlgorithmConfig:
    advantage: str = "grpo"
    normalize_by_std: bool | None = None
    """Of grpo and grpo_passk; null: their default, true."""
    gamma: float | None = None
    """Discount per trained token, of gae and reinforce_plus_plus; null: their default, 1."""
    lam: float | None = None
    """Of gae; null: its default, 1."""
    whiten: bool | None = None
    """Of gae; null: its default, true."""
    advantage_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra keyword arguments of a user's function."""
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    loss_aggregation: str = "token-mean"
    """token-mean | seq-mean-token-sum | seq-mean-token-mean | seq-mean-token-sum-norm."""
    entropy_coefficient: float = 0.0
    kl: KLConfig = field(default_factory=KLConfig)
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    overlong_filtering: bool = False
    """Responses that hit their token limit are not trained; they count in their group's baseline."""
    filter: str | None = None
    """`module_or_file.py:function` f(rewards=, accuracies=, group_ids=, lengths=, clipped=) -> bool [B]: which
    responses are trained."""
