"""Checks across sections, before anything starts. Each message names the full key to change."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from mcore_rl.config.algorithm import is_supervised
from mcore_rl.config.fields import changed, check_domains
from mcore_rl.config.models import ModelConfig, ParallelConfig
from mcore_rl.config.reading.json_files import read_json_object
from mcore_rl.config.roles import POLICY, EngineRole, KeyNames, ModelRole
from mcore_rl.config.rules.engine_support import (
    EXPERT_COUNTS,
    ORIGINAL,
    check_attention,
    check_sglang_model,
    exact_positions,
    rope_section,
)
from mcore_rl.config.rules.estimators import check_estimator
from mcore_rl.config.rules.linear_attention import check_linear_attention
from mcore_rl.config.rules.models import (
    check_graders,
    check_lora,
    check_reference,
    check_reward_model,
    check_reward_source,
    check_terms,
)
from mcore_rl.config.rules.objective import check_objective, check_pairs_per_update, responses_per_prompt
from mcore_rl.config.rules.observe import check_profile, check_trajectories
from mcore_rl.config.rules.precision import (
    check_float16,
    check_float16_engine,
    check_float32_router,
    check_precision,
)
from mcore_rl.config.rules.quantization import check_quantization
from mcore_rl.config.rules.rollout import (
    check_draft_layers,
    check_drafts,
    check_episodes,
    check_overlap_schedule,
    check_sampling_keys,
    check_staleness,
    check_startup_plan,
)
from mcore_rl.config.rules.sharding import check_sharding
from mcore_rl.config.rules.teacher import check_teacher, has_own_ranks, replaces_rewards
from mcore_rl.config.rules.weights import check_weights
from mcore_rl.config.schema import ClusterConfig, Config, RunConfig
from mcore_rl.errors import ConfigError

NO_CRITIC_KEYS = (
    "critic.logprob_chunk_tokens",
    "critic.mtp_loss_coefficient",
    "critic.moe.router_replay",
    "critic.quantization_aware",
)


def validate(config: Config, *, run_here: bool = True) -> None:
    """Run every check that needs only the configuration and the model's config.json.

    run_here=False leaves out checks of this machine, because a plan is made on another machine than the run.
    cluster.device=auto counts as GPUs, as in a plan; runs replace it first.

    Raises: ConfigError for the first setting that cannot work.
    """
    validate_keys(config, run_here=run_here)
    # Last, since it reads a file of the model.
    role = EngineRole.rollout(config.rollout, config.model)
    check_engine_sizes(role, read_hf_config(config.model), cuda=config.cluster.device != "cpu")


def validate_keys(config: Config, *, run_here: bool = True) -> None:
    """Run the checks of `validate` that need only the configuration.

    Raises: ConfigError for the first setting that cannot work.
    """
    policy = ModelRole.policy(config.actor, config.model)
    # Single values first, since the other checks compute with them.
    check_domains(config)
    check_objective(config)
    _check_sizes(config)
    check_episodes(config.rollout, config.algorithm)
    check_staleness(config)
    check_sampling_keys(config.rollout, config.algorithm)
    check_overlap_schedule(config.rollout, config.algorithm)
    check_drafts(config.rollout, config.actor)
    check_weights(config)
    check_quantization(config)
    check_precision(config)
    _check_layout(policy, config)
    _check_batches(policy, config)
    if config.actor.moe.router_replay == "engine" and is_supervised(config.algorithm):
        raise ConfigError(
            "actor.moe.router_replay=engine replays what the engine chose while sampling, and "
            f"algorithm.policy_loss.name={config.algorithm.policy_loss.name} samples nothing; set it to none"
        )
    check_estimator(config)
    check_reference(config)
    check_terms(config.algorithm)
    check_teacher(config)
    if has_own_ranks(config.teacher):
        # All teachers have the layout of one section, so the first one stands for all.
        entry = config.teacher.entries[0]
        _check_layout(ModelRole.teacher_ranks(config.teacher, entry, config.actor, config.model), config)
    check_reward_model(config.reward_model)
    if not replaces_rewards(config.teacher):
        check_reward_source(config.reward_model, config.judge, config.reward, config.rollout)
    check_graders(config.reward, config.rollout)
    check_lora(config)
    check_profile(config.observe.profile, config.trainer.steps, config.num_trainer_ranks)
    check_trajectories(config.observe, config.algorithm)
    if run_here:
        _check_run_dir(config.run)
        check_startup_plan(config)
    _check_training(policy, config.cluster)


def validate_critic(config: Config) -> None:
    """Run the actor's checks on the critic of a run that has one; single values are checked elsewhere.

    Raises: ConfigError naming the key.
    """
    role = ModelRole.critic(config.critic, config.model)
    for key, value, default in changed("critic", config.critic):
        if key.startswith("critic.lora."):
            raise ConfigError(
                f"{key}={value}: a critic is trained completely, since its value head starts random; leave {key} at "
                f"{default}"
            )
        if key in NO_CRITIC_KEYS:
            raise ConfigError(f"{key}={value} has no effect: a critic predicts no tokens; leave it at {default}")
    _check_layout(role, config)
    _check_batches(role, config)
    _check_training(role, config.cluster)
    read_hf_config(role.model, role.checkpoint)


def validate_reward_model(config: Config) -> None:
    """Run the actor's checks on the reward model of a run that has one; single values are checked elsewhere.

    Raises: ConfigError naming the key.
    """
    role = ModelRole.reward_model(config.reward_model, config.model)
    rounding = config.reward_model.quantization_aware
    if rounding:
        raise ConfigError(
            f"reward_model.quantization_aware={rounding} has no effect: no engine holds a reward model; leave it at 0"
        )
    _check_layout(role, config)
    read_hf_config(role.model, role.checkpoint)


def read_hf_config(model: ModelConfig, key: str = POLICY.checkpoint) -> dict[str, Any]:
    """Read the model's config.json; `key` names its directory in errors.

    Raises: ConfigError if the directory or the file is missing or not JSON.
    """
    path = Path(model.hf_path) / "config.json"
    if not path.is_file():
        raise ConfigError(f"{key}={model.hf_path}: no config.json there; set it to an HF model directory")
    return read_json_object(path, key)


def _check_sizes(config: Config) -> None:
    """Check the sizes of batches, responses and engine steps."""
    trainer, rollout, cluster, overlong = config.trainer, config.rollout, config.cluster, config.reward.overlong
    if trainer.prompts_per_step % trainer.prompts_per_update:
        raise ConfigError(
            f"trainer.prompts_per_step={trainer.prompts_per_step} must be a multiple of "
            f"trainer.prompts_per_update={trainer.prompts_per_update}"
        )
    if config.algorithm.dynamic_sampling.enable and rollout.samples_per_prompt < 2:
        raise ConfigError("rollout.samples_per_prompt must be at least 2 with algorithm.dynamic_sampling.enable=true")
    if config.reward.punishes_overlong and overlong.buffer_tokens > rollout.max_response_tokens:
        raise ConfigError(
            f"reward.overlong.buffer_tokens={overlong.buffer_tokens} must be between 1 and "
            f"rollout.max_response_tokens={rollout.max_response_tokens}"
        )
    budget = rollout.max_batched_tokens
    if budget is not None and budget < rollout.max_concurrent_requests:
        raise ConfigError(
            f"rollout.max_batched_tokens={budget} must be at least rollout.max_concurrent_requests="
            f"{rollout.max_concurrent_requests}: every sequence that is decoded takes one token of a pass"
        )
    if rollout.expert_parallel and rollout.tp == 1:
        raise ConfigError("rollout.expert_parallel=true spreads experts over rollout.tp ranks; set rollout.tp above 1")
    check_attention(rollout)
    if rollout.nodes and cluster.placement == "colocated":
        raise ConfigError(
            f"rollout.nodes={rollout.nodes} reserves nodes for engines; set cluster.placement=disaggregated, or "
            "leave it out"
        )
    if rollout.nodes >= cluster.nodes:
        raise ConfigError(
            f"rollout.nodes={rollout.nodes} of cluster.nodes={cluster.nodes} leave no node for the trainer ranks; "
            "lower it"
        )


def _check_layout(role: ModelRole, config: Config) -> None:
    """Require that the longest sequence fits in one packed row, and that the model divides its ranks, which share the
    slots of the trainer ranks."""
    check_sharding(role)
    check_float16(role, cuda=config.cluster.device != "cpu")
    cluster, rollout, parallel = config.cluster, config.rollout, role.section.parallel
    budget, key = role.section.tokens_per_microbatch, role.key("tokens_per_microbatch")
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    if longest > budget:
        raise ConfigError(
            f"{key}={budget} must be at least rollout.max_prompt_tokens + rollout.max_response_tokens = {longest}: a "
            "sequence is never split over micro-batches"
        )
    if parallel.cp > 1 and budget % (2 * parallel.cp):
        raise ConfigError(
            f"{key}={budget} must be a multiple of 2 x {role.key('parallel.cp')} = {2 * parallel.cp}, to which "
            "sequences are padded"
        )
    trainer_ranks = config.num_trainer_ranks
    ranks = role.section.num_ranks or trainer_ranks
    offered = (cluster.nodes - rollout.nodes) * cluster.gpus_per_node
    if ranks > offered:
        less = " less rollout.nodes" if rollout.nodes else ""
        raise ConfigError(
            f"{role.key('num_ranks')}={ranks}, but cluster.nodes x cluster.gpus_per_node{less} offers {offered}; "
            "lower it or raise cluster.nodes"
        )
    # The default of etp depends on the model, which is not known here. 1 is the weakest requirement.
    check_ranks_divide(parallel, ranks, parallel.etp or 1, role)
    if ranks > trainer_ranks:
        raise ConfigError(
            f"{role.key('num_ranks')}={ranks} ranks share the slots of the {trainer_ranks} trainer ranks; lower it"
        )


def _check_batches(role: ModelRole, config: Config) -> None:
    """Require a response for every data-parallel rank of a trained model in each update."""
    parallel, ranks = role.section.parallel, role.section.num_ranks or config.num_trainer_ranks
    data_ranks = ranks // (parallel.tp * parallel.pp * parallel.cp)
    check_pairs_per_update(config, data_ranks)
    if config.trainer.prompts_per_update * responses_per_prompt(config) < data_ranks:
        factors = "" if is_supervised(config.algorithm) else " x rollout.samples_per_prompt"
        raise ConfigError(
            f"trainer.prompts_per_update{factors} must be at least {data_ranks}, the number of data-parallel ranks"
        )


def check_ranks_divide(parallel: ParallelConfig, num_ranks: int, etp: int, names: KeyNames) -> None:
    """Raise ConfigError if a copy of the model, or of its experts, does not divide the number of ranks."""
    dense = {"tp": parallel.tp, "pp": parallel.pp, "cp": parallel.cp}
    expert = {"ep": parallel.ep, "etp": etp, "pp": parallel.pp}
    for sizes in (dense, expert):
        product = math.prod(sizes.values())
        if num_ranks % product:
            keys = [f"{names.key(f'parallel.{name}')}={size}" for name, size in sizes.items()]
            whose = f"ranks of the {names.prefix.replace('_', ' ')} ({names.key('num_ranks')})"
            if names.prefix == POLICY.prefix:
                whose = f"trainer ranks ({names.key('num_ranks')}, or cluster.nodes x cluster.gpus_per_node)"
            raise ConfigError(
                f"{' x '.join(keys)} = {product} does not divide the {num_ranks} {whose}; set sizes whose product "
                "divides them"
            )


def _check_training(role: ModelRole, cluster: ClusterConfig) -> None:
    """Check the keys of a model that is trained: its optimizer, and what moves to host memory."""
    section, key = role.section, role.key("optimizer.cpu_offload")
    if section.overlap_param_gather:
        for needed in ("distributed_optimizer", "overlap_grad_reduce"):
            if not getattr(section, needed):
                raise ConfigError(
                    f"{role.key('overlap_param_gather')}=true needs {role.key(needed)}=true: "
                    "only sharded parameters are gathered, and in the order in which gradients were reduced"
                )
    if section.optimizer.cpu_offload and not section.distributed_optimizer:
        raise ConfigError(f"{key}=true needs {role.key('distributed_optimizer')}=true")
    if section.optimizer.cpu_offload and section.offload.optimizer:
        raise ConfigError(f"{role.key('offload.optimizer')}=true has no effect with {key}=true; set it to false")
    for part in ("params", "grads", "optimizer") if cluster.placement != "colocated" else ():
        if getattr(section.offload, part):
            raise ConfigError(
                f"{role.key('offload')}.{part}=true makes room for an engine on the same device, which "
                f"cluster.placement={cluster.placement} does not have; set it to false"
            )


def _check_run_dir(run: RunConfig) -> None:
    path = Path(run.dir)
    if path.exists() and not path.is_dir():
        raise ConfigError(f"run.dir={path} exists and is not a directory")
    # The run creates missing parents, so the nearest existing directory must be writable.
    parent = path
    while not parent.exists():
        parent = parent.parent
    if not os.access(parent, os.W_OK):
        raise ConfigError(f"run.dir={path}: {parent} is not writable; set run.dir to a place that is")


def check_engine_sizes(role: EngineRole, hf: dict[str, Any], *, cuda: bool) -> None:
    """Require that the engine can divide and run a model with these sizes. `cuda`: it runs on GPUs.

    Raises: ConfigError naming the key.
    """
    # The text model inside a model that reads images has the sizes.
    hf = {**(hf.get("text_config") or {}), **hf}
    _check_counts(role, hf)
    rollout, heads = role.section, hf.get("num_attention_heads")
    tp = 1 if rollout.data_parallel_attention else rollout.tp
    groups = hf.get("num_key_value_heads") or heads
    if heads and heads % tp:
        raise ConfigError(f"{role.key('tp')}={tp} must divide the model's {heads} attention heads")
    # With more ranks than key-value heads, engines replicate the heads.
    if groups and groups % tp and tp % groups:
        raise ConfigError(
            f"{role.key('tp')}={tp} must divide the model's {groups} key-value heads, or be a multiple of them"
        )
    check_sglang_model(role, hf, cuda=cuda)
    check_linear_attention(role, hf, cuda=cuda)
    check_float32_router(role, hf)
    check_float16_engine(role, hf, cuda=cuda)
    check_draft_layers(rollout, hf.get("num_nextn_predict_layers"))
    if rollout.expert_parallel:
        key, experts = role.key("expert_parallel"), max(hf.get(count) or 0 for count in EXPERT_COUNTS)
        if not experts:
            raise ConfigError(f"{key}=true, but the model has no experts; set it to false")
        if experts < rollout.tp:
            raise ConfigError(
                f"{key}=true places whole experts on {role.key('tp')}={rollout.tp} ranks, but there are only {experts} "
                "experts; use fewer ranks, or set it to false"
            )
    check_positions(role, hf)
    if (limit := _yarn_positions(hf)) is not None:
        _check_longest(role, *limit)


def check_positions(role: EngineRole, hf: dict[str, Any], whose: str = "the model's") -> None:
    """Require that the model is exact for the longest sequence of a run. whose: the model in the error.

    Raises: ConfigError naming the keys and the field of config.json.
    """
    if (limit := exact_positions(hf)) is not None:
        _check_longest(role, *limit, whose)


def _check_longest(role: EngineRole, field: str, limit: int, whose: str = "the model's") -> None:
    longest = role.section.max_prompt_tokens + role.section.max_response_tokens
    if longest > limit:
        raise ConfigError(
            f"{role.key('max_prompt_tokens')} + {role.key('max_response_tokens')} = {longest} exceeds {whose} "
            f"{field}={limit}; lower them"
        )


def _check_counts(role: EngineRole, hf: dict[str, Any]) -> None:
    """Check the values of config.json with which this module computes; the model's family checks the others."""
    for name in ("num_attention_heads", "num_key_value_heads", "max_position_embeddings"):
        count = hf.get(name)
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise ConfigError(
                f"{role.checkpoint}: config.json: {name} is {count!r}; it must be a whole number of at least 1"
            )


def _yarn_positions(hf: dict[str, Any]) -> tuple[str, int] | None:
    """Return the number of positions for which engines precompute YaRN's rotary embedding; larger positions are not
    checked at run time."""
    name, scaling = rope_section(hf, "yarn")
    if scaling is None:
        return None
    factor, original = scaling.get("factor"), scaling.get(ORIGINAL)
    if not isinstance(factor, int | float) or not isinstance(original, int | float):
        return None  # rejected by the model's family
    return f"{name}.factor * {ORIGINAL}", int(factor * original)
