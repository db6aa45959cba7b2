"""Entries of `algorithm.per_source`, and the names of advantage estimators."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from mcore_rl.config.algorithm.policy_loss import SAMPLED_LOSSES, PolicyLossConfig
from mcore_rl.config.fields import setting

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


@dataclass
class SourceLossConfig(PolicyLossConfig):
    """Policy loss of a data_source with the keys of algorithm.policy_loss. Options that are null have the loss's
    defaults; the options of algorithm.policy_loss do not apply."""

    name: str = setting(MISSING, choices=SAMPLED_LOSSES, function=True)
    """Policy loss of sampled responses: a built-in name or `module_or_file.py:function`."""


@dataclass
class SourceConfig:
    """An entry of algorithm.per_source. Options of the estimator that are null have the values of section algorithm or,
    if the entry names an estimator, the estimator's defaults."""

    source: str = MISSING
    """data_source of the rows."""
    weight: float = setting(1.0, minimum=0)
    """Factor of the loss of the source's responses, and of their term of algorithm.observation_coefficient. The
    denominators do not change; but responses with weight 0 do not count in the mean of the observations."""
    advantage: str | None = setting(None, choices=ADVANTAGES)
    """Advantage estimator of the source's responses; null: algorithm.advantage."""
    normalize_by_std: bool | None = None
    """Divide by a standard deviation, like algorithm.normalize_by_std."""
    std_level: str | None = setting(None, choices=STD_LEVELS)
    """Standard deviation by which grpo divides, like algorithm.std_level, over the responses of the source."""
    leave_one_out: bool | None = None
    """Exclude a response from its baseline, like algorithm.leave_one_out."""
    policy_loss: SourceLossConfig | None = None
    """Policy loss of the source's responses, a mapping with the keys of algorithm.policy_loss such as {name: gspo,
    clip_high: 0.0004}; null: algorithm.policy_loss."""
    entropy_coefficient: float | None = None
    """Coefficient of the entropy bonus for the source's responses; null: algorithm.entropy_coefficient."""
    kl_in_loss: float | None = setting(None, minimum=0)
    """Coefficient of the KL term in the loss of the source's responses; null: algorithm.kl.in_loss. The estimator is
    algorithm.kl.loss_kind."""

    @property
    def has_estimator(self) -> bool:
        """True if the advantages of the source are estimated separately."""
        options = (self.advantage, self.normalize_by_std, self.std_level, self.leave_one_out)
        return any(option is not None for option in options)

    @property
    def has_loss(self) -> bool:
        """True if the loss of the source is computed separately."""
        return any(option is not None for option in (self.policy_loss, self.entropy_coefficient, self.kl_in_loss))
