"""Rules for the keys of section `reward`."""

from __future__ import annotations

from mcore_rl.config.fields import changed, reject_unless_default
from mcore_rl.config.functions import names_function
from mcore_rl.config.reward import BATCH, BY_DATA_SOURCE, DAPO, GROUP, NAIVE, STEP, RewardConfig
from mcore_rl.config.rules.rollout import episode_of, has_turns
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.errors import ConfigError


def check_graders(reward: RewardConfig, rollout: RolloutConfig) -> None:
    """Raise ConfigError for a key without effect and for contradictory keys."""
    if all(entry.function != BY_DATA_SOURCE for entry in reward.entries):
        reject_unless_default("reward", reward, f"set reward.function={BY_DATA_SOURCE}", ["functions"])
    # reward.weighted replaces these keys, so there is no setting with which they have an effect.
    if reward.weighted:
        for key, value, default in changed("reward", reward):
            if key == "reward.function" or key.startswith("reward.kwargs"):
                raise ConfigError(f"{key}={value} has no effect with reward.weighted; leave it at {default}")
    else:
        reject_unless_default("reward", reward, "set reward.weighted", ["accuracy_of"])
    _check_kwargs(reward)
    _check_manager(reward)
    if reward.batch == STEP:
        _check_whole_steps(rollout)


def _check_whole_steps(rollout: RolloutConfig) -> None:
    """Check reward.batch=step: all responses of a step must exist at the same time, and only the function grades
    them."""
    chosen = f"reward.batch={STEP}"
    if rollout.max_staleness:
        raise ConfigError(
            f"{chosen} grades all responses of a step together, but with rollout.max_staleness="
            f"{rollout.max_staleness} each group is graded when it ends; set reward.batch={GROUP}, or "
            "rollout.max_staleness=0"
        )
    if has_turns(rollout):
        raise ConfigError(
            f"{chosen} supports single turns only, but rollout.episode={episode_of(rollout)}; set reward.batch={GROUP}"
        )


def _check_kwargs(reward: RewardConfig) -> None:
    """Reject arguments of built-in graders, which take none."""
    for number, entry in enumerate(reward.entries):
        # With by_data_source, the arguments go to the functions in reward.functions.
        given = reward.functions.values() if entry.function == BY_DATA_SOURCE else [entry.function]
        if entry.kwargs and not any(map(names_function, given)):
            key = f"reward.weighted[{number}].kwargs" if reward.weighted else "reward.kwargs"
            raise ConfigError(
                f"{key}={entry.kwargs} has no effect: {entry.function} takes no arguments; leave {key} at {{}}"
            )


def _check_manager(reward: RewardConfig) -> None:
    if reward.manager == NAIVE and reward.workers > 1:
        raise ConfigError(
            f"reward.manager={NAIVE} grades one response at a time, but reward.workers={reward.workers}; set "
            "reward.workers=1 or reward.manager=prime"
        )
    if reward.manager == NAIVE:
        reject_unless_default("reward", reward, "set reward.manager=prime", ["max_concurrent_calls"])
    if reward.manager == DAPO and reward.overlong.enable is False:
        raise ConfigError(
            f"reward.manager={DAPO} enables reward.overlong, but reward.overlong.enable=false; leave it at null, or "
            "set reward.manager=prime"
        )
    if reward.manager != BATCH:
        reject_unless_default("reward", reward, f"set reward.manager={BATCH}", ["batch"])
    # Built-in graders take one response per call.
    elif reward.weighted or not names_function(reward.function):
        raise ConfigError(
            f"reward.manager={BATCH} grades several responses per call, which {reward.chosen} does not support; set "
            "reward.function=module_or_file.py:function"
        )
