"""Rules for the keys of asynchronous training."""

from __future__ import annotations

from mcore_rl.config.algorithm import is_supervised
from mcore_rl.config.rules.changed_keys import reject_unless_default
from mcore_rl.config.rules.episodes import concurrent_episodes, has_turns
from mcore_rl.config.schema import Config, RolloutConfig
from mcore_rl.config.staleness import FINISH, RECOMPUTE
from mcore_rl.errors import ConfigError

ASYNCHRONOUS_KEYS = ("max_staleness_hard", "swap", "partial_tokens", "replay_schedule")


def check_staleness(config: Config) -> None:
    """Raise ConfigError naming contradictory keys, or a feature that does not support asynchronous training."""
    rollout = config.rollout
    if is_supervised(config.algorithm):
        return
    if rollout.max_staleness == 0:
        remedy = "set rollout.max_staleness above 0"
        reject_unless_default("rollout", rollout, remedy, ASYNCHRONOUS_KEYS)
        reject_unless_default("checkpoint", config.checkpoint, remedy, ("drain",))
        return
    asked = f"rollout.max_staleness={rollout.max_staleness}"
    if rollout.hard_staleness < rollout.max_staleness:
        raise ConfigError(
            f"rollout.max_staleness_hard={rollout.max_staleness_hard} is below {asked}, the average staleness; raise "
            "it, or lower rollout.max_staleness"
        )
    _check_paused(rollout, drain=config.checkpoint.drain)
    if config.cluster.placement == "colocated":
        raise ConfigError(
            f"{asked} generates while the trainer updates, but colocated engines share devices with the trainer ranks; "
            "set cluster.placement=disaggregated, or rollout.max_staleness=0"
        )
    # Admission needs free slots for a whole group (admission.may_submit); a larger group could never start.
    slots = concurrent_episodes(rollout)
    if rollout.samples_per_prompt > slots:
        raise ConfigError(
            f"rollout.samples_per_prompt={rollout.samples_per_prompt} exceeds the {slots} concurrent requests of an "
            f"engine, and with {asked} all responses of a group start together; raise rollout.max_concurrent_requests"
        )
    if config.algorithm.advantage == "remax":
        raise ConfigError(
            f"{asked}: algorithm.advantage=remax needs a greedy baseline from the weights that sampled the group, but "
            "these have changed; choose another estimator, or set rollout.max_staleness=0"
        )
    if config.actor.moe.router_replay == "engine" and rollout.swap != FINISH:
        raise ConfigError(
            f"{asked} with rollout.swap={rollout.swap} changes weights during responses, but "
            "actor.moe.router_replay=engine replays the experts of one version; set rollout.swap=finish, or "
            "actor.moe.router_replay=none"
        )


def _check_paused(rollout: RolloutConfig, *, drain: bool) -> None:
    """Check keys with which responses wait for later weights: partial_tokens and replay_schedule."""
    if rollout.partial_tokens is not None and rollout.swap == FINISH:
        raise ConfigError(
            f"rollout.partial_tokens={rollout.partial_tokens} pauses responses until the next weight version, but with "
            "rollout.swap=finish the next version waits for all responses; set rollout.swap=keep or recompute, or "
            "leave rollout.partial_tokens at null"
        )
    if rollout.replay_schedule is not None and (rollout.swap != RECOMPUTE or has_turns(rollout)):
        raise ConfigError(
            f"rollout.replay_schedule={rollout.replay_schedule} supports single-turn episodes with "
            f"rollout.swap=recompute, but rollout.swap is {rollout.swap} and rollout.episode is {rollout.episode}; set "
            "rollout.swap=recompute and single turns, or leave rollout.replay_schedule at null"
        )
    if rollout.replay_schedule is not None and drain:
        raise ConfigError(
            "checkpoint.drain=true waits until running responses have finished, but with "
            f"rollout.replay_schedule={rollout.replay_schedule} they wait for later weights; set checkpoint.drain=false"
        )
