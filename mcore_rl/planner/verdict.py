"""Comparison of a plan with the cluster. Every error names the keys to change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mcore_rl.config.algorithm import is_supervised
from mcore_rl.config.models import FSDP2, ActorConfig
from mcore_rl.config.roles import ModelRole
from mcore_rl.config.rules.teacher import has_own_ranks, is_on_engines, is_on_ranks, teacher_prompt_tokens
from mcore_rl.config.schema import ClusterConfig, Config, RolloutConfig
from mcore_rl.planner.activations import SET_TOKENS
from mcore_rl.planner.engine import GIB, EngineRank, longest_sequence
from mcore_rl.planner.host_memory import HostMemory, fullest_node
from mcore_rl.planner.phases import FRAGMENTATION, PHASES, RESERVE_BYTES, Phases, usable_bytes
from mcore_rl.planner.sync import WeightSync
from mcore_rl.planner.workload import BatchArithmetic
from model_converters.mapping.layout import TrainLayout


@dataclass(frozen=True)
class Verdict:
    """Result of the comparison. `errors` is empty exactly when the plan fits. `host` is the memory of the fullest
    node."""

    errors: tuple[str, ...]
    warnings: tuple[str, ...]
    host: HostMemory


def compare_with_cluster(
    config: Config,
    layout: TrainLayout,
    phases: Sequence[Phases],
    engine: EngineRank,
    batch: BatchArithmetic,
    sync: WeightSync,
    *,
    cuda: bool,
) -> Verdict:
    """Compare the memory of all phases, the engine and the hosts with the cluster."""
    rollout, cluster = config.rollout, config.cluster
    host = fullest_node(config, phases, engine, sync, cuda=cuda)
    errors = []
    usable = usable_bytes(cluster)
    for name in PHASES if cuda else ():
        sizes = [each.by_name.get(name, 0) for each in phases]
        needed = max(sizes)
        rank = sizes.index(needed)
        if needed > usable:
            errors.append(
                f"cluster.gpu_memory_gib={cluster.gpu_memory_gib:g} is too little for phase {name}: rank {rank} needs "
                f"{needed / GIB:.1f} GiB of {usable / GIB:.1f} usable ({RESERVE_BYTES / GIB:g} GiB and "
                f"{FRAGMENTATION:.0%} are reserved); {_remedy(config, layout, name, phases[rank])}"
            )
    if not is_supervised(config.algorithm):
        errors += _engine_errors(rollout, cluster, layout, engine, cuda=cuda)
    limit = cluster.host_memory_gib
    if limit is not None and host.total > limit * GIB:
        errors.append(
            f"cluster.host_memory_gib={limit:g}: a node needs {host.total / GIB:.0f} GiB of host memory "
            f"({host.describe()}); {_host_remedy(config, host)}"
        )
    warnings = [*_warnings(rollout, cluster, layout, engine, batch, cuda=cuda), *_mask_warnings(config)]
    return Verdict(tuple(errors), tuple(warnings), host)


def _host_remedy(config: Config, host: HostMemory) -> str:
    steps = ["checkpoint.async_save=false"] if host.checkpoint else []
    actor = config.actor
    steps += [f"actor.offload.{part}=false" for part in ("params", "optimizer") if getattr(actor.offload, part)]
    steps += ["actor.optimizer.cpu_offload=false"] if actor.optimizer.cpu_offload else []
    # Neither depends on the number of nodes.
    steps += ["a higher rollout.tp"] if host.kept_weights or host.routed_experts else []
    return "set " + ", or ".join([*steps, "a higher cluster.nodes"])


def _remedy(config: Config, layout: TrainLayout, phase: str, phases: Phases) -> str:
    away = _not_offloaded("actor", config.actor)
    if "critic" in phases.by_name and phase != "critic":
        away += _not_offloaded("critic", config.critic)
    if (is_on_ranks(config.teacher) or has_own_ranks(config.teacher)) and not config.teacher.offload:
        away.append("teacher.offload=true")
    if phase in ("critic", "score"):
        section: ActorConfig
        role, section = ("critic", config.critic) if phase == "critic" else ("reward_model", config.reward_model)
        # A reward model has no backward pass, so recomputation saves nothing.
        steps = away if phase == "score" or section.recompute == "full" else ["critic.recompute=full", *away]
        # Models of transformers are only data-parallel.
        axes = "cluster.nodes" if section.strategy == FSDP2 else f"{role}.parallel.{_axes(section, experts=True)}"
        steps.append(f"a higher {axes}")
    elif phase in ("generate", "sync"):
        steps = [*away, "a lower rollout.gpu_memory_fraction" if phase == "generate" else "a higher rollout.tp"]
    elif phase == "teacher" and is_on_engines(config.teacher):
        steps = [*away, "a lower teacher.gpu_memory_fraction"]
    elif phase == "teacher" and has_own_ranks(config.teacher):
        steps = [*away, *_own_teacher_steps(config)]
    else:
        longest = longest_sequence(config.rollout)
        steps = [] if phase == "teacher" or config.actor.recompute == "full" else ["actor.recompute=full"]
        if config.actor.tokens_per_microbatch > longest:
            steps.append(f"actor.tokens_per_microbatch={longest}")
        # An update has all state on the device, so offloading does not help it.
        if phase in ("logp", "teacher"):
            steps += away
        if config.actor.strategy != FSDP2:
            steps.append(f"a higher actor.parallel.{_axes(config.actor, experts=layout.ep > 1)}")
        steps.append("a higher cluster.nodes")
    return "set " + ", or ".join(steps)


def _own_teacher_steps(config: Config) -> list[str]:
    """Return settings that lower the memory of teachers on ranks of their own."""
    role = ModelRole.teacher_ranks(config.teacher, config.teacher.entries[0], config.actor, config.model)
    longest = teacher_prompt_tokens(config) + config.rollout.max_response_tokens
    steps = [f"teacher.tokens_per_microbatch={longest}"] if role.section.tokens_per_microbatch > longest else []
    if role.section.strategy != FSDP2:
        steps.append(f"a higher teacher.parallel.{_axes(role.section, experts=True)} with more teacher.num_ranks")
    return [*steps, "a higher cluster.nodes"]


def _not_offloaded(role: str, section: ActorConfig) -> list[str]:
    # Gradients of shards have no memory between updates.
    parts = ("optimizer", "params") if section.shards_parameters else ("optimizer", "grads", "params")
    return [f"{role}.offload.{part}=true" for part in parts if not getattr(section.offload, part)]


def _axes(section: ActorConfig, *, experts: bool) -> str:
    """Return the keys of axes that divide the weights further. Sharded parameters exclude pipeline stages."""
    axes = ["ep"] * experts + ["pp"] * (not section.shards_parameters) + ["tp"]
    return " or ".join(filter(None, (", ".join(axes[:-1]), axes[-1])))


def _engine_errors(
    rollout: RolloutConfig, cluster: ClusterConfig, layout: TrainLayout, engine: EngineRank, *, cuda: bool
) -> Iterator[str]:
    offered = cluster.nodes * cluster.gpus_per_node
    slots = offered if cluster.placement == "colocated" else offered - layout.world_size
    engines = rollout.num_engines * rollout.tp
    if cuda and engines > slots:
        yield (
            f"rollout.num_engines x rollout.tp = {engines} GPUs, but {slots} are available for engines; lower "
            "rollout.num_engines"
        )
    if engine.sequences >= 1:
        return
    # The cache must hold one sequence of full length, or the engine could never finish it.
    longest = longest_sequence(rollout) * engine.kv_bytes_per_token
    sglang = rollout.engine == "sglang"  # its fraction does not contain the workspace
    fixed = engine.weights_bytes + (0 if sglang else engine.workspace_bytes + engine.asleep_bytes)
    if not cuda:
        yield (
            f"rollout.kv_cache_gib={rollout.kv_cache_gib:g} does not hold one sequence of "
            f"rollout.max_prompt_tokens + rollout.max_response_tokens; set it to at least {longest / GIB:.3f}"
        )
    else:
        yield (
            f"rollout.gpu_memory_fraction={rollout.gpu_memory_fraction:g} leaves no room for one sequence: an "
            f"engine rank needs {fixed / GIB:.1f} GiB for weights{'' if sglang else ', workspace and buffers'} and "
            f"{longest / GIB:.2f} GiB of KV cache; raise rollout.tp or rollout.gpu_memory_fraction"
        )


def _mask_warnings(config: Config) -> Iterator[str]:
    """State the memory of sampling sets, whose size depends on the policy."""
    rollout = config.rollout
    if not rollout.keep_sampling_mask or is_supervised(config.algorithm):
        return
    tokens = config.trainer.prompts_per_step * rollout.samples_per_prompt * rollout.max_response_tokens
    yield (
        f"rollout.keep_sampling_mask=true: the sets of a step's {tokens:,} tokens are not counted, because their size "
        f"depends on the policy; sets of {SET_TOKENS} tokens take {4 * SET_TOKENS * tokens / GIB:.2f} GiB of host "
        "memory on all nodes together (rollout/kept_tokens_mean shows the real size)"
    )


def _warnings(
    rollout: RolloutConfig,
    cluster: ClusterConfig,
    layout: TrainLayout,
    engine: EngineRank,
    batch: BatchArithmetic,
    *,
    cuda: bool,
) -> Iterator[str]:
    beside = engine.workspace_bytes + engine.asleep_bytes
    left = (1 - rollout.gpu_memory_fraction) * cluster.gpu_memory_gib * GIB
    # The memory of colocated engines is an error of their phase.
    if cuda and rollout.engine == "sglang" and cluster.placement != "colocated" and beside > left:
        yield (
            f"rollout.gpu_memory_fraction={rollout.gpu_memory_fraction:g} leaves {left / GIB:.1f} GiB of a GPU beside "
            f"SGLang's weights and KV cache, but workspace, buffers and CUDA graphs may need {beside / GIB:.1f} GiB; "
            "lower it"
        )
    if engine.sequences >= 1 and engine.engine_sequences < rollout.max_concurrent_requests:
        yield (
            f"rollout.max_concurrent_requests={rollout.max_concurrent_requests}: the KV cache holds "
            f"{engine.engine_sequences:.1f} sequences of full length; more are preempted when they grow"
        )
    if layout.pp > 1 and batch.microbatches < layout.pp:
        yield (
            f"actor.parallel.pp={layout.pp}: an update has {batch.microbatches} micro-batches per rank, so the "
            "pipeline idles more than half of the time; raise trainer.prompts_per_update or lower "
            "actor.tokens_per_microbatch"
        )
