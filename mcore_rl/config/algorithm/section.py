"""Section `algorithm`: advantages, losses, corrections, selection of groups."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from mcore_rl.config.algorithm.corrections import CorrectionConfig, ListedCorrectionConfig
from mcore_rl.config.algorithm.policy_loss import PREFERENCE, SCORES, SUPERVISED, PolicyLossConfig
from mcore_rl.config.algorithm.sources import ADVANTAGES, STD_LEVELS, SourceConfig
from mcore_rl.config.fields import setting
from mcore_rl.config.rules.presets import PRESETS
from mcore_rl.errors import ConfigError

LOSS_AGGREGATIONS = (
    *("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
    *("prompt-mean", "token-sum"),
)
KL_KINDS = ("k1", "abs", "mse", "low_var", "k2", "k3")


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
    baseline: str = setting("prompt", choices=("prompt", "source", "role"))
    """Responses that an estimator compares with each other. prompt: all responses to a prompt; source: all responses of
    a step to prompts with the same data_source; role: the responses of one role in all episodes of a prompt, for
    episodes in which several agents speak (docs/episodes.md). The reward of a role is the reward of its episode without
    the rewards of the turns of other roles."""
    per_source: list[SourceConfig] = field(default_factory=list)
    """List of loss weights, estimators and losses by data_source. A source with its own estimator or options is
    estimated separately from the others: statistics of the step (std_level, whitening) cover its responses only. The
    same holds for its loss: tokens are chosen among its tokens of an update (clip_cov, kl_cov, high_entropy_share,
    measure second_moment). The denominator of algorithm.loss_aggregation covers all sources."""
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
    subtracted from the reward before advantages are computed; 0: none. Sequences of an episode have one penalty for all
    their tokens; with algorithm.baseline=role, each role of the episode has one for its own."""
    overlong_filtering: bool = False
    """Exclude responses that reached their token limit from training; they still count in their group's baseline."""
    filter: str | None = setting(None, function=True)
    """`module_or_file.py:function`, called as f(rewards=, accuracies=, group_ids=, lengths=, clipped=). It returns bool
    [B]: the responses to train."""

    @property
    def uses_sources(self) -> bool:
        """True if advantages, losses or their weights depend on the data_source of a response."""
        return bool(self.per_source) or self.baseline == "source"

    @property
    def loss_settings(self) -> list[AlgorithmConfig]:
        """Settings of the loss: the section itself, then one for each source with its own loss, in the order of
        per_source. Only policy_loss, entropy_coefficient and kl differ."""
        return [self, *(self._with_loss_of(entry) for entry in self.per_source if entry.has_loss)]

    @property
    def loss_sources(self) -> list[str]:
        """Sources with their own loss: loss number i + 1 in `loss_settings` is of source i."""
        return [entry.source for entry in self.per_source if entry.has_loss]

    def _with_loss_of(self, entry: SourceConfig) -> AlgorithmConfig:
        loss, bonus, kl = entry.policy_loss, entry.entropy_coefficient, entry.kl_in_loss
        # The settings are of one source, which has no others.
        return replace(
            self,
            per_source=[],
            policy_loss=self.policy_loss if loss is None else loss,
            entropy_coefficient=self.entropy_coefficient if bonus is None else bonus,
            kl=self.kl if kl is None else replace(self.kl, in_loss=kl),
        )

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
