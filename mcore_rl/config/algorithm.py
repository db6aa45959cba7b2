"""Section `algorithm`: advantages, losses, corrections, selection of groups."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from omegaconf import MISSING

from mcore_rl.config.fields import check_domains, setting
from mcore_rl.config.rules.presets import PRESETS
from mcore_rl.errors import ConfigError

# Copies of the registries' names in algorithms/, which imports torch; a test checks that they are equal.
GROUP_ADVANTAGES = (
    *("grpo", "grpo_passk", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg"),
    *("maxrl", "gdpo", "optimal_token_baseline"),
)
"""Estimators that compare the responses of a group with each other."""
COMPARING_ADVANTAGES = (*GROUP_ADVANTAGES, "remax")
"""Estimators that compare samples of a prompt with each other or with a greedy response."""
ADVANTAGES = ("gae", "reinforce_plus_plus", *COMPARING_ADVANTAGES)
STD_LEVELS = ("group", "batch", "batch_rewards")
SUPERVISED = "sft"
"""Loss name of supervised training, which generates no responses."""
PREFERENCE = "dpo"
"""Loss name of training on pairs of responses, which generates no responses."""
SCORES = "reward_model"
"""Loss name of training a reward model on pairs of responses, which generates no responses."""
POLICY_LOSSES = (
    *("ppo_clip", "gspo", "gmpo", "clip_cov", "kl_cov", "cispo", "sapo", "dppo_tv", "dppo_kl", "vespo", "dro", "fipo"),
    *("real", "decoupled_ppo", "reinforce"),
    SUPERVISED,
    PREFERENCE,
    SCORES,
)
LOSS_AGGREGATIONS = (
    *("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
    *("prompt-mean", "token-sum"),
)
KL_KINDS = ("k1", "abs", "mse", "low_var", "k2", "k3")


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


@dataclass
class CorrectionConfig:
    """Importance correction for the difference between the engine, which samples, and the trainer, which computes the
    same policy with slightly different results. Each token's loss is multiplied by a factor that is computed from the
    weight exp(old_logp - rollout_logp) and its bounds."""

    PREFIX: ClassVar[str] = "algorithm.correction."

    kind: str = setting("auto", choices=("auto", "none", "truncate", "mask", "reject"))
    """Factor of a weight: truncate, the weight within the bounds; mask, the weight, or 0 out of bounds; reject, 1, or 0
    out of bounds; none: no correction. auto: truncate with rollout.quantization, if the policy loss supports
    corrections; else none."""
    level: str = setting("token", choices=("token", "sequence", "geometric", "any_token"))
    """Unit of the weights: each token, a response's product (sequence), or a response's geometric mean (geometric).
    any_token, for kind reject: a response is dropped if one of its tokens is out of bounds."""
    low: float | None = setting(None, minimum=0)
    """Lower bound; null: 1 / high for mask and for reject with measure ratio, otherwise 0."""
    high: float | None = setting(2.0, above=0)
    """Upper bound; null: none."""
    apply: bool = True
    """Apply the correction to the loss; false: only report its metrics."""
    measure: str = setting("ratio", choices=("ratio", "k2", "k3", "bernoulli_kl", "second_moment"))
    """Quantity that the bounds limit: ratio, the weight w; k2 or k3, for kind reject, (log w)^2 / 2 or w - 1 - log w of
    each token (level token, any_token), its sum (sequence) or its mean (geometric); bernoulli_kl, for kind reject at
    level token or any_token: the larger of the two KL divergences between trainer and engine, whose two outcomes are
    the sampled token and any other token, in nats; second_moment, for kind reject at level token: the mean of the
    squared log weight over the kept tokens of an update. Tokens with the largest squared log weights are dropped until
    it is at most high; each update takes an additional forward pass."""
    negative_only: bool = False
    """Drop only tokens with a negative advantage; above level token, only responses whose advantages have a negative
    sum. Needs kind reject."""
    policy: str = setting("old", choices=("old", "current"))
    """Trainer's policy in the weight: before the first update of the batch (old), or at the update (current)."""

    def __post_init__(self) -> None:
        check_domains(self, self.PREFIX)
        low, high = self.bounds
        if not 0 <= low < high:
            raise ConfigError(f"{self.PREFIX}low={low:g} must be at least 0 and less than {self.PREFIX}high={high:g}")
        if self.kind != "reject":
            for key, value, free in (
                ("level", self.level, self.level != "any_token"),
                ("measure", self.measure, self.measure == "ratio"),
                ("negative_only", str(self.negative_only).lower(), not self.negative_only),
            ):
                if not free:
                    raise ConfigError(f"{self.PREFIX}{key}={value} needs {self.PREFIX}kind=reject, not {self.kind}")
        if self.measure == "bernoulli_kl" and self.level not in ("token", "any_token"):
            raise ConfigError(
                f"{self.PREFIX}level={self.level}: {self.PREFIX}measure=bernoulli_kl is a quantity of single tokens; "
                "set the level to token or any_token"
            )

        if self.measure == "second_moment":
            if self.high is None:
                raise ConfigError(
                    f"{self.PREFIX}high=null: {self.PREFIX}measure=second_moment drops no token without a bound; set "
                    "it to the largest mean, such as 0.04"
                )
            for key, value, free in (
                ("level", self.level, self.level == "token"),
                ("low", str(self.low), self.low is None),
                ("negative_only", "true", not self.negative_only),
            ):
                if not free:
                    raise ConfigError(
                        f"{self.PREFIX}{key}={value}: {self.PREFIX}measure=second_moment drops the tokens with the "
                        f"largest log weights of an update, up to {self.PREFIX}high; leave {key} at its default"
                    )

    @property
    def bounds(self) -> tuple[float, float]:
        """Lower and upper bound; the upper one may be infinite."""
        high = math.inf if self.high is None else self.high
        if self.low is not None:
            return self.low, high
        # The default bounds of these are symmetric in the logarithm of the weight.
        symmetric = self.kind in ("mask", "reject") and self.measure == "ratio"
        return (1 / high if symmetric else 0.0), high


@dataclass
class ListedCorrectionConfig(CorrectionConfig):
    """An entry of algorithm.corrections."""

    PREFIX: ClassVar[str] = "algorithm.corrections: "

    kind: str = setting("truncate", choices=("truncate", "mask", "reject"))
    """Factor of a weight, as in algorithm.correction.kind."""


@dataclass
class KLConfig:
    """KL terms that keep the policy close to the reference. A reference exists if a coefficient is above 0."""

    in_loss: float = setting(0.0, minimum=0)
    """Coefficient of the KL term in the policy loss."""
    loss_kind: str = setting("low_var", choices=KL_KINDS)
    """Per-token estimator of the KL in the loss; mse = k2, low_var = k3. The gradient of k1 has mean 0."""
    unbiased: bool = False
    """Multiply the KL in the loss by the ratio to the old policy, exp(logp - old_logp), so that value and gradient are
    unbiased for tokens of the old policy. Needs loss_kind k1 or low_var."""
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
class DriftPenaltyConfig:
    """Penalty in the loss on the squared log ratio between the policy and the policy that sampled, for any policy
    loss."""

    coefficient: float = setting(0.0, minimum=0)
    """Coefficient of (logp - anchor)^2 in the loss, per nat squared; 0: none."""
    anchor: str = setting("rollout", choices=("old", "rollout"))
    """Policy in the denominator of the ratio: the engine's at sampling (rollout), or the trainer's before the first
    update of a batch (old)."""


@dataclass
class EntropyControlConfig:
    """Adaptive coefficient of the entropy bonus, which holds the entropy of the policy at a target."""

    target: float | None = setting(None, above=0, unit="nats")
    """Target of the mean entropy per trained token. After a step with a lower entropy, the coefficient rises by `step`,
    otherwise it falls; after an entropy above the target, the next step has no bonus. null: the coefficient is
    fixed."""
    step: float = setting(0.005, above=0)
    """Change of the coefficient per training step."""
    minimum: float = setting(0.0, minimum=0)
    """Lower bound of the coefficient."""
    maximum: float = setting(1.0, above=0)
    """Upper bound of the coefficient."""


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
class SourceConfig:
    """An entry of algorithm.per_source. Options that are null have the values of section algorithm or, if the entry
    names an estimator, the estimator's defaults."""

    source: str = MISSING
    """data_source of the rows."""
    weight: float = setting(1.0, minimum=0)
    """Factor of the loss of the source's responses. The denominator of algorithm.loss_aggregation does not change. The
    term of algorithm.observation_coefficient has no factor; a weight of 0 leaves the responses out of it."""
    advantage: str | None = setting(None, choices=ADVANTAGES)
    """Advantage estimator of the source's responses; null: algorithm.advantage."""
    normalize_by_std: bool | None = None
    """Divide by a standard deviation, like algorithm.normalize_by_std."""
    std_level: str | None = setting(None, choices=STD_LEVELS)
    """Standard deviation by which grpo divides, like algorithm.std_level, over the responses of the source."""
    leave_one_out: bool | None = None
    """Exclude a response from its baseline, like algorithm.leave_one_out."""

    @property
    def has_estimator(self) -> bool:
        """True if the advantages of the source are estimated separately."""
        options = (self.advantage, self.normalize_by_std, self.std_level, self.leave_one_out)
        return any(option is not None for option in options)


@dataclass
class AlgorithmConfig:
    """Advantages, losses, KL terms and selection of groups."""

    advantage: str = setting("grpo", choices=ADVANTAGES, function=True)
    """Advantage estimator, by name or as `module_or_file.py:function`; docs/algorithms.md contains the formulas."""
    normalize_by_std: bool | None = None
    """Divide the advantages of grpo and grpo_passk by a standard deviation; null: true."""
    std_level: str | None = setting(None, choices=STD_LEVELS)
    """Standard deviation by which grpo divides. group: of the rewards of the group; batch: of the undivided advantages
    of the step; batch_rewards: of all rewards of the step. null: group."""
    leave_one_out: bool | None = None
    """Baseline of grpo: the mean reward of the other responses of the group, without the response itself; null:
    false."""
    part_weights: dict[str, float] = field(default_factory=dict)
    """Weights of the parts of the reward for gdpo, by name. Parts are numbers that reward functions return besides the
    score, the scores of entries of reward.weighted, and the scores of reward models."""
    gamma: float | None = setting(None, minimum=0, maximum=1)
    """Discount per trained token for gae and reinforce_plus_plus; null: 1."""
    lam: float | None = setting(None, minimum=0, maximum=1)
    """Lambda of gae; null: 1."""
    whiten: bool | None = None
    """Whiten the advantages of gae; null: true."""
    advantage_kwargs: dict[str, Any] = field(default_factory=dict)
    """Additional keyword arguments of a user's estimator."""
    baseline: str = setting("prompt", choices=("prompt", "source"))
    """Responses that an estimator compares with each other. prompt: all responses to a prompt; source: all responses of
    a step to prompts with the same data_source."""
    per_source: list[SourceConfig] = field(default_factory=list)
    """List of loss weights and estimators by data_source. A source with its own estimator or options is estimated
    separately from the others: statistics of the step (std_level, whitening) cover its responses only."""
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    corrections: list[ListedCorrectionConfig] = field(default_factory=list)
    """List of corrections with the keys of algorithm.correction, which it replaces. Each is computed from all trained
    tokens; their factors are multiplied. At most one may be a weight (truncate, mask); the others are of kind
    reject."""
    correction_preset: str | None = setting(None, choices=tuple(PRESETS))
    """Named setting of verl or SkyRL that sets algorithm.corrections, old_logp and, for some names, policy_loss.name;
    null: none. The resolved configuration contains these values, and null here."""
    old_logp: str = setting("trainer", choices=("trainer", "rollout"))
    """Old policy of the loss: the trainer's before the first update of a batch, which takes a forward pass over the
    samples of all later updates; or rollout, the engine's log-probabilities at sampling, without a pass. Then the
    loss's ratio contains the difference between trainer and engine, and corrections may only drop (kind reject, policy
    current)."""
    loss_aggregation: str = setting("token-mean", choices=LOSS_AGGREGATIONS)
    """Reduction of per-token losses to the loss of an update."""
    high_entropy_share: float = setting(1.0, above=0, maximum=1)
    """Share of the trained tokens of an update that keep their policy loss: those with the highest entropy. The others
    have none, but still count in the loss's denominator. Below 1, each update takes an additional forward pass."""
    entropy_coefficient: float = 0.0
    """Coefficient of the entropy bonus in the loss; 0: none. With algorithm.entropy_control.target, the initial
    value."""
    entropy_control: EntropyControlConfig = field(default_factory=EntropyControlConfig)
    observation_coefficient: float = setting(0.0, minimum=0)
    """Coefficient of the cross-entropy, in the loss, of tokens that were not sampled: results of tools and other
    messages between the turns of an episode, which the policy learns to predict; 0: none. The mean over the trained
    responses of the mean over their tokens, whatever algorithm.loss_aggregation is."""
    kl: KLConfig = field(default_factory=KLConfig)
    drift_penalty: DriftPenaltyConfig = field(default_factory=DriftPenaltyConfig)
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    length_penalty: float = setting(0.0, minimum=0)
    """Penalty per trained token, multiplied by the pass rate of the response's group (at least 1 / group size), and
    subtracted from the reward before advantages are computed; 0: none."""
    overlong_filtering: bool = False
    """Exclude responses that reached their token limit from training; they still count in their group's baseline."""
    filter: str | None = setting(None, function=True)
    """`module_or_file.py:function`, called as f(rewards=, accuracies=, group_ids=, lengths=, clipped=). It returns bool
    [B]: the responses to train."""

    @property
    def uses_sources(self) -> bool:
        """True if advantages or loss weights depend on the data_source of a response."""
        return bool(self.per_source) or self.baseline == "source"

    def __post_init__(self) -> None:
        named = [entry.source for entry in self.per_source]
        if twice := [name for name in dict.fromkeys(named) if named.count(name) > 1]:
            raise ConfigError(f"algorithm.per_source names {', '.join(twice)} twice; join the entries")
        if self.normalize_by_std is False and self.std_level is not None:
            raise ConfigError(
                f"algorithm.std_level={self.std_level} has no effect with algorithm.normalize_by_std=false; remove it"
            )
        kind = self.correction.kind
        if self.corrections and kind != "auto":
            raise ConfigError(
                f"algorithm.correction.kind={kind} has no effect with algorithm.corrections; remove it, or add it to "
                "the list"
            )
        weights = [entry.kind for entry in self.corrections if entry.apply and entry.kind != "reject"]
        if len(weights) > 1:
            raise ConfigError(
                f"algorithm.corrections contains {len(weights)} weights ({', '.join(weights)}), which would correct "
                "the same difference several times; keep one, and set kind of the others to reject"
            )
        moments = [entry for entry in self.corrections if entry.measure == "second_moment"]
        if len(moments) > 1:
            raise ConfigError(
                f"algorithm.corrections contains {len(moments)} entries with measure second_moment; keep the one with "
                "the smallest high"
            )
        single = [] if kind in ("auto", "none") else [self.correction]
        for entry in self.corrections or single:
            if self.old_logp == "rollout" and (entry.kind, entry.policy) != ("reject", "current"):
                raise ConfigError(
                    f"{entry.PREFIX}kind={entry.kind}, policy={entry.policy}: with algorithm.old_logp=rollout the "
                    "loss's ratio contains this weight already; set kind to reject and policy to current"
                )


def is_supervised(algorithm: AlgorithmConfig) -> bool:
    """Return True if texts of the data set are trained on and nothing is sampled."""
    return algorithm.policy_loss.name in (SUPERVISED, PREFERENCE, SCORES)
