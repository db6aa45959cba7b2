"""What the keys of asynchronous rollouts ask of each other, and of the rest."""

from __future__ import annotations

from mcore_rl.config.algorithm import is_supervised
from mcore_rl.config.rules.episodes import concurrent_episodes
from mcore_rl.config.rules.unused import refuse_unless_default
from mcore_rl.config.schema import Config
from mcore_rl.config.staleness import FINISH
from mcore_rl.errors import ConfigError

OF_ASYNCHRONOUS_RUNS = ("max_staleness_hard", "swap", "partial_tokens")


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
    if rollout.partial_tokens is not None and rollout.swap == FINISH:
        raise ConfigError(
            f"rollout.partial_tokens={rollout.partial_tokens} lets responses wait for the next weights, and with "
            "rollout.swap=finish the next weights wait for the responses; set rollout.swap=keep or recompute, or leave "
            "rollout.partial_tokens at null"
        )
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
