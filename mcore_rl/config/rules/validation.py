"""Cross-field checks, all before anything starts. Each message names the full key to change."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcore_rl.config.algorithm import is_supervised
from mcore_rl.config.fields import check_domains
from mcore_rl.config.models import ParallelConfig
from mcore_rl.config.names import role_key, role_keys
from mcore_rl.config.rules.available import check_rdt_model, check_sglang_model
from mcore_rl.config.rules.episodes import check_episodes
from mcore_rl.config.rules.graders import check_graders
from mcore_rl.config.rules.lora import check_lora, check_no_critic_lora
from mcore_rl.config.rules.reference import check_reference
from mcore_rl.config.rules.reward_model import check_rewards
from mcore_rl.config.rules.roles import as_actor, keys_of
from mcore_rl.config.rules.sampling import check_sampling_keys
from mcore_rl.config.rules.staleness import check_staleness
from mcore_rl.config.rules.tools import check_tool_keys
from mcore_rl.config.rules.unused import changed
from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError

NOT_OF_A_CRITIC = ("critic.logprob_chunk_tokens", "critic.mtp_loss_coefficient", "critic.moe.router_replay")
EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Where families keep the number of routed experts in config.json."""


def num_trainer_ranks(config: Config) -> int:
    """Trainer ranks of this run: actor.num_ranks, or every slot of the nodes that are not the engines' alone."""
    return config.actor.num_ranks or _trainer_nodes(config) * config.cluster.gpus_per_node


def _trainer_nodes(config: Config) -> int:
    return config.cluster.nodes - config.rollout.nodes


def num_critic_ranks(config: Config) -> int:
    """Ranks of the critic: critic.num_ranks, or as many as the policy has."""
    return config.critic.num_ranks or num_trainer_ranks(config)


def num_reward_model_ranks(config: Config) -> int:
    """Ranks of the reward model: reward_model.num_ranks, or as many as the policy has."""
    return config.reward_model.num_ranks or num_trainer_ranks(config)


def validate(config: Config, *, run_here: bool = True) -> None:
    """Runs every check that needs only the configuration and the model's config.json; run_here=False leaves out
    what this machine is asked, as a plan is made on another one than the run.

    Raises: ConfigError for the first thing that cannot work.
    """
    for check in (
        check_domains,
        _check_batches,
        _check_lengths,
        check_episodes,
        check_staleness,
        check_sampling_keys,
        _check_row,
        _check_engine,
        _check_layout,
        _check_actor,
        _check_replay,
        check_reference,
        check_rewards,
        check_graders,
        check_lora,
        check_tool_keys,
        _check_run_dir,
    ):
        if run_here or check is not _check_run_dir:
            check(config)
    _check_host_optimizer(config)
    _check_offload(config)
    check_model(config, read_hf_config(config))


def validate_critic(config: Config) -> None:
    """What `validate` checks of the actor beside values, of the critic; for runs that have one.

    Raises: ConfigError naming the key.
    """
    critic = config.critic
    check_no_critic_lora(critic.lora)
    with role_keys(keys_of(critic)):
        view = as_actor(config, replace(critic, num_ranks=num_critic_ranks(config)))
        for check in (_check_row, _check_layout, _check_actor, _check_host_optimizer, _check_offload):
            check(view)
        read_hf_config(view)
    for key, value, default in changed("critic", critic):
        if key in NOT_OF_A_CRITIC:
            raise ConfigError(f"{key}={value} has no effect: a critic predicts no tokens; leave it at {default}")


def validate_reward_model(config: Config) -> None:
    """What `validate` checks of the actor beside values, of the reward model; for runs that have one.

    Raises: ConfigError naming the key.
    """
    with role_keys(keys_of(config.reward_model)):
        view = as_actor(config, replace(config.reward_model, num_ranks=num_reward_model_ranks(config)))
        for check in (_check_row, _check_layout):
            check(view)
        read_hf_config(view)


def read_hf_config(config: Config) -> dict[str, Any]:
    """The model's config.json.

    Raises: ConfigError when the directory or the file is missing or not JSON.
    """
    path = Path(config.model.hf_path) / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"{role_key('model.hf_path')}={config.model.hf_path}: no config.json there; set it to an HF model directory"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{role_key('model.hf_path')}: {path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{role_key('model.hf_path')}: {path} must hold a JSON object")
    return content


def _check_batches(config: Config) -> None:
    trainer = config.trainer
    if trainer.prompts_per_step % trainer.prompts_per_update:
        raise ConfigError(
            f"trainer.prompts_per_step={trainer.prompts_per_step} must be a multiple of "
            f"trainer.prompts_per_update={trainer.prompts_per_update}"
        )
    if config.algorithm.dynamic_sampling.enable and config.rollout.samples_per_prompt < 2:
        raise ConfigError("rollout.samples_per_prompt must be at least 2 with algorithm.dynamic_sampling.enable=true")


def _check_lengths(config: Config) -> None:
    rollout, overlong = config.rollout, config.reward.overlong
    if config.reward.punishes_overlong and not 0 < overlong.buffer_tokens <= rollout.max_response_tokens:
        raise ConfigError(
            f"reward.overlong.buffer_tokens={overlong.buffer_tokens} must be between 1 and "
            f"rollout.max_response_tokens={rollout.max_response_tokens}"
        )


def _check_engine(config: Config) -> None:
    rollout = config.rollout
    budget = rollout.max_batched_tokens
    if budget is not None and budget < rollout.max_concurrent_requests:
        raise ConfigError(
            f"rollout.max_batched_tokens={budget} must be at least rollout.max_concurrent_requests="
            f"{rollout.max_concurrent_requests}: every sequence that is decoded takes one token of a pass"
        )
    if rollout.expert_parallel and rollout.tp == 1:
        raise ConfigError("rollout.expert_parallel=true spreads experts over rollout.tp ranks; set rollout.tp above 1")


def _check_row(config: Config) -> None:
    """Whether the longest sequence fits in one packed row, padded as context parallelism pads it."""
    budget, parallel = config.actor.tokens_per_microbatch, config.actor.parallel
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    if longest > budget:
        raise ConfigError(
            f"{role_key('actor.tokens_per_microbatch')}={budget} must be at least "
            f"{role_key('rollout.max_prompt_tokens')} + {role_key('rollout.max_response_tokens')} = {longest}: a "
            "sequence is never split over micro-batches"
        )
    if parallel.cp > 1 and budget % (2 * parallel.cp):
        raise ConfigError(
            f"{role_key('actor.tokens_per_microbatch')}={budget} must be a multiple of 2 x "
            f"{role_key('actor.parallel.cp')} = {2 * parallel.cp}, to which sequences are padded"
        )


def _check_layout(config: Config) -> None:
    parallel, own_nodes = config.actor.parallel, config.rollout.nodes
    if own_nodes and config.cluster.placement == "colocated":
        raise ConfigError(
            f"rollout.nodes={own_nodes} gives nodes to the engines alone; set cluster.placement=disaggregated, or "
            "leave it out"
        )
    if own_nodes >= config.cluster.nodes:
        raise ConfigError(
            f"rollout.nodes={own_nodes} of cluster.nodes={config.cluster.nodes} leave none to the trainer ranks; lower "
            "it"
        )
    offered, ranks = _trainer_nodes(config) * config.cluster.gpus_per_node, num_trainer_ranks(config)
    if ranks > offered:
        less = " less rollout.nodes" if own_nodes else ""
        raise ConfigError(
            f"{role_key('actor.num_ranks')}={ranks}, but cluster.nodes x cluster.gpus_per_node{less} offers {offered}; "
            "lower it or raise cluster.nodes"
        )
    # The default of etp depends on the model; whatever it is, these must divide.
    check_ranks_divide(parallel, ranks, parallel.etp or 1)
    data_ranks = ranks // (parallel.tp * parallel.pp * parallel.cp)
    if config.trainer.prompts_per_update * config.rollout.samples_per_prompt < data_ranks:
        raise ConfigError(
            f"trainer.prompts_per_update x rollout.samples_per_prompt must be at least {data_ranks}, the number of "
            "data-parallel ranks"
        )


def check_ranks_divide(parallel: ParallelConfig, num_ranks: int, etp: int) -> None:
    """Raises: ConfigError where the model, or its experts, do not go into so many ranks a whole number of times."""
    dense = {"tp": parallel.tp, "pp": parallel.pp, "cp": parallel.cp}
    expert = {"ep": parallel.ep, "etp": etp, "pp": parallel.pp}
    for sizes in (dense, expert):
        product = math.prod(sizes.values())
        if num_ranks % product:
            keys = [f"{role_key(f'actor.parallel.{name}')}={size}" for name, size in sizes.items()]
            raise ConfigError(
                f"{' x '.join(keys)} = {product} does not divide the {num_ranks} trainer ranks "
                f"({role_key('actor.num_ranks')}, or cluster.nodes x cluster.gpus_per_node); set sizes whose product "
                "divides them"
            )


def _check_host_optimizer(config: Config) -> None:
    actor = config.actor
    if actor.optimizer.cpu_offload and not actor.distributed_optimizer:
        raise ConfigError(
            f"{role_key('actor.optimizer.cpu_offload')}=true needs {role_key('actor.distributed_optimizer')}=true"
        )
    if actor.optimizer.cpu_offload and actor.offload.optimizer:
        raise ConfigError(
            f"{role_key('actor.offload.optimizer')}=true has nothing to move with "
            f"{role_key('actor.optimizer.cpu_offload')}=true; set it to false"
        )


def _check_actor(config: Config) -> None:
    actor = config.actor
    if actor.overlap_param_gather:
        for needed in ("distributed_optimizer", "overlap_grad_reduce"):
            if not getattr(actor, needed):
                raise ConfigError(
                    f"{role_key('actor.overlap_param_gather')}=true needs {role_key('actor')}.{needed}=true: "
                    "only sharded parameters are gathered, and in the order in which gradients were reduced"
                )


def _check_replay(config: Config) -> None:
    if config.actor.moe.router_replay != "engine":
        return
    if is_supervised(config.algorithm):
        raise ConfigError(
            "actor.moe.router_replay=engine replays what the engine chose while sampling, and "
            "algorithm.policy_loss.name=sft samples nothing; set it to none"
        )


def _check_offload(config: Config) -> None:
    if config.cluster.placement == "colocated":
        return
    for part in ("params", "grads", "optimizer"):
        if getattr(config.actor.offload, part):
            raise ConfigError(
                f"{role_key('actor.offload')}.{part}=true makes room for an engine on the same device, which "
                f"cluster.placement={config.cluster.placement} does not have; set it to false"
            )


def _check_run_dir(config: Config) -> None:
    path = Path(config.run.dir)
    if path.exists() and not path.is_dir():
        raise ConfigError(f"run.dir={path} exists and is not a directory")
    parent = path
    while not parent.exists():
        parent = parent.parent
    if not os.access(parent, os.W_OK):
        raise ConfigError(f"run.dir={path}: {parent} is not writable; set run.dir to a place that is")


def check_model(config: Config, hf: dict[str, Any]) -> None:
    """What generation needs of the model; whether the trainer's layout fits is megatron.layout's to say."""
    tp, heads = config.rollout.tp, hf.get("num_attention_heads")
    groups = hf.get("num_key_value_heads") or heads
    if heads and heads % tp:
        raise ConfigError(f"{role_key('rollout.tp')}={tp} must divide the model's {heads} attention heads")
    if groups and groups % tp and tp % groups:
        raise ConfigError(
            f"{role_key('rollout.tp')}={tp} must divide the model's {groups} key-value heads, or be a multiple of them"
        )
    check_sglang_model(config, hf)
    check_rdt_model(config, hf)
    if config.rollout.expert_parallel:
        key, experts = role_key("rollout.expert_parallel"), max(hf.get(count) or 0 for count in EXPERT_COUNTS)
        if not experts:
            raise ConfigError(f"{key}=true, but the model has no experts; set it to false")
        if experts < tp:
            raise ConfigError(
                f"{key}=true gives each of {role_key('rollout.tp')}={tp} ranks whole ones of {experts} "
                "experts; lower the ranks, or set it to false"
            )
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    for name, limit in (("max_position_embeddings", hf.get("max_position_embeddings")), _yarn_positions(hf)):
        if limit and longest > limit:
            raise ConfigError(
                f"{role_key('rollout.max_prompt_tokens')} + {role_key('rollout.max_response_tokens')} = {longest} "
                f"exceeds the model's {name}={limit}"
            )


def _yarn_positions(hf: dict[str, Any]) -> tuple[str, int | None]:
    """The positions for which engines tabulate the rotation of yarn; an index beyond the table is not checked."""
    name = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    scaling = hf.get(name)
    if not isinstance(scaling, dict) or scaling.get("rope_type", scaling.get("type")) != "yarn":
        return name, None
    key = "original_max_position_embeddings"
    factor, original = scaling.get("factor"), hf.get(key, scaling.get(key))
    if not isinstance(factor, int | float) or not isinstance(original, int | float):
        return name, None  # rejected by the model's family
    return f"{name}.factor * {key}", int(factor * original)
