"""What the keys of asynchronous rollouts ask of each other, and of the rest."""

from __future__ import annotations

from mcore_rl.config.algorithm import is_supervised
from mcore_rl.config.rules.episodes import concurrent_episodes, has_turns
from mcore_rl.config.rules.unused import refuse_unless_default
from mcore_rl.config.schema import Config
from mcore_rl.config.staleness import FINISH, RECOMPUTE
from mcore_rl.errors import ConfigError

OF_ASYNCHRONOUS_RUNS = ("max_staleness_hard", "swap", "partial_tokens", "replay_schedule")


def check_staleness(config: Config) -> None:
    """Raises: ConfigError naming keys that contradict each other, or what cannot run asynchronously."""
    rollout = config.rollout
    if is_supervised(config.algorithm):
        return
    if rollout.max_staleness == 0:
        remedy = "set rollout.max_staleness above 0"
        refuse_unless_default("rollout", rollout, remedy, OF_ASYNCHRONOUS_RUNS)
        refuse_unless_default("checkpoint", config.checkpoint, remedy, ("drain",))
        return
    asked = f"rollout.max_staleness={rollout.max_staleness}"
    if rollout.hard_staleness < rollout.max_staleness:
        raise ConfigError(
            f"rollout.max_staleness_hard={rollout.max_staleness_hard} is below {asked}, the mean that it bounds; "
            "raise it, or lower the mean"
        )
    _check_parking(config)
    if config.cluster.placement == "colocated":
        raise ConfigError(
            f"{asked} generates while the trainer updates, and colocated engines take turns with the trainer ranks on "
            "the same devices; set cluster.placement=disaggregated, or rollout.max_staleness=0"
        )
    slots = concurrent_episodes(rollout)
    if rollout.samples_per_prompt > slots:
        raise ConfigError(
            f"rollout.samples_per_prompt={rollout.samples_per_prompt} exceeds the {slots} requests that one engine "
            f"has under way together, and with {asked} a group begins as a whole; raise "
            "rollout.max_concurrent_requests"
        )
    _refuse_by_name(config, asked)


def _check_parking(config: Config) -> None:
    """Of responses that wait for the next weights, or for those that a replay says."""
    rollout = config.rollout
    if rollout.partial_tokens is not None and rollout.swap == FINISH:
        raise ConfigError(
            f"rollout.partial_tokens={rollout.partial_tokens} lets responses wait for the next weights, and with "
            "rollout.swap=finish the next weights wait for the responses; set rollout.swap=keep or recompute, or leave "
            "rollout.partial_tokens at null"
        )
    if rollout.replay_schedule is not None and (rollout.swap != RECOMPUTE or has_turns(rollout)):
        raise ConfigError(
            f"rollout.replay_schedule={rollout.replay_schedule} repeats when weights changed under responses of one "
            f"turn, whose KV cache was computed anew then, and rollout.swap is {rollout.swap}, rollout.episode "
            f"{rollout.episode}; set rollout.swap=recompute, without turns, or leave rollout.replay_schedule at null"
        )
    if rollout.replay_schedule is not None and config.checkpoint.drain:
        raise ConfigError(
            "checkpoint.drain=true waits until responses have ended, and those of a run with "
            f"rollout.replay_schedule={rollout.replay_schedule} wait for later weights; set checkpoint.drain=false"
        )


def _refuse_by_name(config: Config, asked: str) -> None:
    """What works with synchronous rollouts only."""
    if config.algorithm.advantage == "remax":
        raise ConfigError(
            f"{asked}: the greedy baseline of algorithm.advantage=remax is that of the weights that sampled, which "
            "have changed by then; choose another estimator, or set rollout.max_staleness=0"
        )
    if config.actor.moe.router_replay == "engine" and config.rollout.swap != FINISH:
        raise ConfigError(
            f"{asked} with rollout.swap={config.rollout.swap} lets responses begin with some weights and end with "
            "others, and actor.moe.router_replay=engine replays the experts of one; set rollout.swap=finish, or the "
            "replay to none"
        )
