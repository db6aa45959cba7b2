"""Rules for the reward model, and for rewards as a whole."""

from __future__ import annotations

from mcore_rl.config.models import RewardModelConfig
from mcore_rl.config.reward import NO_RULE, JudgeConfig, RewardConfig
from mcore_rl.config.rules.changed_keys import changed, reject_unless_default
from mcore_rl.config.rules.episodes import has_turns
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.errors import ConfigError

FROZEN_MODEL_KEYS = "hf_path weight num_ranks tokens_per_microbatch moe.dispatcher fp8 offload.params".split()
"""Keys, in addition to parallel.*, that affect a model without gradients and vocabulary."""


def uses_reward_model(section: RewardModelConfig) -> bool:
    """Return True if a reward model on its own ranks scores responses."""
    return section.hf_path is not None


def check_rewards(section: RewardModelConfig, judge: JudgeConfig, reward: RewardConfig, rollout: RolloutConfig) -> None:
    """Raise ConfigError for a key without effect, and if nothing gives rewards."""
    if section.hf_path is None:
        reject_unless_default("reward_model", section, "set reward_model.hf_path")
    for key, value, default in changed("reward_model", section):
        name = key.removeprefix("reward_model.")
        if name not in FROZEN_MODEL_KEYS and not name.startswith("parallel."):
            raise ConfigError(
                f"{key}={value} has no effect: a reward model is not trained and predicts no tokens; leave it at "
                f"{default}"
            )
    if section.weight == 0:
        raise ConfigError(
            f"reward_model.weight={section.weight} must be a number other than 0; without a reward model set "
            "reward_model.hf_path to null"
        )
    scored = uses_reward_model(section) or judge.hf_path is not None or judge.url is not None
    if reward.function == NO_RULE and not scored and not has_turns(rollout):
        raise ConfigError(
            "reward.function=none leaves responses without a reward; set reward_model.hf_path to a sequence "
            "classification checkpoint, judge.hf_path or judge.url to a model that judges, rollout.environment or "
            "rollout.episode to episodes that give rewards, or reward.function to a rule"
        )
