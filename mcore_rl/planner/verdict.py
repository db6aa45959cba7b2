"""Comparison of a plan with the cluster. Every error names the keys to change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mcore_rl.config.algorithm import is_supervised
from mcore_rl.config.models import ActorConfig, OffloadConfig
from mcore_rl.config.schema import ClusterConfig, Config, RolloutConfig
from mcore_rl.planner.engine import GIB, EngineRank, longest_sequence
from mcore_rl.planner.phases import FRAGMENTATION, PHASES, RESERVE_BYTES, Phases, usable_bytes
from mcore_rl.planner.sync import WeightSync
from mcore_rl.planner.workload import BatchArithmetic
from model_converters.mapping.layout import TrainLayout


@dataclass(frozen=True)
class Verdict:
    """Result of the comparison. `errors` is empty exactly when the plan fits.

    `host_bytes_per_node`: offloaded state and staging buffers on the fullest node.
    """

    errors: tuple[str, ...]
    warnings: tuple[str, ...]
    host_bytes_per_node: int


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
    host = host_bytes_per_node(cluster.gpus_per_node, phases, sync)
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
    if limit is not None and host > limit * GIB:
        errors.append(
            f"cluster.host_memory_gib={limit:g}: a node puts {host / GIB:.0f} GiB of offloaded state and weight "
            "buckets into host memory; unset an actor.offload key, or use more nodes (cluster.nodes)"
        )
    return Verdict(tuple(errors), tuple(_warnings(rollout, cluster, layout, engine, batch, cuda=cuda)), host)


def host_bytes_per_node(size: int, phases: Sequence[Phases], sync: WeightSync) -> int:
    """Return the host memory of the fullest node. Consecutive ranks share a node of `size` GPUs."""
    away = [sum(rank.host_bytes for rank in phases[i : i + size]) for i in range(0, len(phases), size)]
    return max(away) + sync.slots_bytes


def _remedy(config: Config, layout: TrainLayout, phase: str, phases: Phases) -> str:
    away = _not_offloaded("actor", config.actor.offload)
    if "critic" in phases.by_name and phase != "critic":
        away += _not_offloaded("critic", config.critic.offload)
    if phase in ("critic", "score"):
        section: ActorConfig
        role, section = ("critic", config.critic) if phase == "critic" else ("reward_model", config.reward_model)
        # A reward model has no backward pass, so recomputation saves nothing.
        steps = away if phase == "score" or section.recompute == "full" else ["critic.recompute=full", *away]
        steps.append(f"a higher {role}.parallel.ep, pp or tp")
    elif phase in ("generate", "sync"):
        steps = [*away, "a lower rollout.gpu_memory_fraction" if phase == "generate" else "a higher rollout.tp"]
    else:
        longest = longest_sequence(config.rollout)
        steps = [] if config.actor.recompute == "full" else ["actor.recompute=full"]
        if config.actor.tokens_per_microbatch > longest:
            steps.append(f"actor.tokens_per_microbatch={longest}")
        # An update has all state on the device, so offloading does not help it.
        if phase == "logp":
            steps += away
        steps.append("a higher " + ("actor.parallel.ep, pp or tp" if layout.ep > 1 else "actor.parallel.pp or tp"))
        steps.append("a higher cluster.nodes")
    return "set " + ", or ".join(steps)


def _not_offloaded(role: str, offload: OffloadConfig) -> list[str]:
    return [f"{role}.offload.{part}=true" for part in ("optimizer", "grads", "params") if not getattr(offload, part)]


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
    fixed = engine.weights_bytes + (0 if sglang else engine.workspace_bytes)
    if cluster.device == "cpu":
        yield (
            f"rollout.kv_cache_gib={rollout.kv_cache_gib:g} does not hold one sequence of "
            f"rollout.max_prompt_tokens + rollout.max_response_tokens; set it to at least {longest / GIB:.3f}"
        )
    else:
        yield (
            f"rollout.gpu_memory_fraction={rollout.gpu_memory_fraction:g} leaves no room for one sequence: an "
            f"engine rank needs {fixed / GIB:.1f} GiB for weights{'' if sglang else ' and workspace'} and "
            f"{longest / GIB:.2f} GiB of KV cache; raise rollout.tp or rollout.gpu_memory_fraction"
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
    beside = engine.workspace_bytes + engine.graphs_bytes
    left = (1 - rollout.gpu_memory_fraction) * cluster.gpu_memory_gib * GIB
    # The memory of colocated engines is an error of their phase.
    if cuda and rollout.engine == "sglang" and cluster.placement != "colocated" and beside > left:
        yield (
            f"rollout.gpu_memory_fraction={rollout.gpu_memory_fraction:g} leaves {left / GIB:.1f} GiB of a GPU beside "
            f"SGLang's weights and KV cache, but workspace and CUDA graphs may need {beside / GIB:.1f} GiB; lower it"
        )
    if 1 <= engine.sequences < rollout.max_concurrent_requests:
        yield (
            f"rollout.max_concurrent_requests={rollout.max_concurrent_requests}: the KV cache holds "
            f"{engine.sequences:.1f} sequences of full length; more are preempted when they grow"
        )
    if layout.pp > 1 and batch.microbatches < layout.pp:
        yield (
            f"actor.parallel.pp={layout.pp}: an update has {batch.microbatches} micro-batches per rank, so the "
            "pipeline idles more than half of the time; raise trainer.prompts_per_update or lower "
            "actor.tokens_per_microbatch"
        )
