"""`mcore-rl plan --suggest`: layouts that fit the cluster, fastest first, and the cost of each.

Every combination of tp, pp, ep, etp and cp that divides the ranks and the model is estimated, with balanced stages and
the least recomputation and offloading that fits. Layouts with the optimizer on the host are tried only if no other
layout fits. The layouts are sorted by step time; the first ones are confirmed by an exact plan, until one fits.

The estimated time is used for sorting only:

    time = (FLOP / rate x slowest stage / mean stage x recomputation x narrow + messages / bandwidth) x (1 + bubble)
    narrow = 1 + 256 / (units of an expert or MLP on one rank): narrow matrix products are slower
    bubble = (pp - 1) / micro-batches of a rank
    messages, per token and layer, in hidden states: tp 4 (tp - 1) / tp; experts, of a rank's own tokens,
    4 topk ((ep - 1) / ep + etp - 1); cp 3 x keys and values x (cp - 1) / cp. Per update and
    parameter 4 + weight bytes, over dp ranks

A group with more ranks than a node has GPUs communicates at the network's bandwidth. Source of the bubble:
D. Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters", section 2.2.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from mcore_rl.config.models import ActorConfig, OffloadConfig, ParallelConfig
from mcore_rl.config.rules.models import reject_suggestions
from mcore_rl.config.schema import ClusterConfig, Config, RolloutConfig
from mcore_rl.planner.activations import stage_activations
from mcore_rl.planner.candidates import candidate_layouts, parallel_of
from mcore_rl.planner.engine import GIB
from mcore_rl.planner.layers.execution import Execution
from mcore_rl.planner.model_size import model_size
from mcore_rl.planner.phases import Phases, rank_phases, usable_bytes
from mcore_rl.planner.plan import Job, make_plan
from mcore_rl.planner.state import RankState
from mcore_rl.planner.workload import batch_arithmetic, step_flops
from mcore_rl.resolved.recompute import recomputed_modules
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.table import is_parameter

PEAK_TFLOPS = 989.0
"""Peak of an H100 in bfloat16, used if plan.peak_tflops is not set."""
NODE_BYTES_PER_SECOND, NETWORK_BYTES_PER_SECOND = 200e9, 40e9
"""Bandwidth of one GPU in collectives: NVLink within a node, 400 Gbit/s InfiniBand between nodes."""
THIN_UNITS = 256
"""Units of an expert or MLP on one rank with which its matrix products reach half of the rate of wide ones."""
HOST_BYTES_PER_SECOND = 25e9
"""One GPU's share of the bandwidth of PCIe and host memory."""
# In the order of cost: each moves more than the one before.
OFFLOADS = (
    OffloadConfig(),
    OffloadConfig(optimizer=True),
    OffloadConfig(optimizer=True, grads=True),
    OffloadConfig(optimizer=True, grads=True, params=True),
)
# The optimizer state is in host memory all the time, so it is not offloaded.
WITH_HOST_OPTIMIZER = (OffloadConfig(), OffloadConfig(grads=True), OffloadConfig(grads=True, params=True))
SELECTIVE_COST, MLP_COST, FULL_COST = 0.05, 0.2, 1 / 3
"""Additional FLOP of an update: cheap modules recomputed, dense MLPs recomputed, everything recomputed."""


@dataclass(frozen=True)
class Suggestion:
    """A layout that fits, with the keys to set (`overrides`). `exact`: confirmed by an exact plan."""

    overrides: tuple[str, ...]
    estimated_step_seconds: float
    peak_bytes: int
    gives_up: tuple[str, ...]
    exact: bool = False


@dataclass(frozen=True)
class Suggestions:
    """Result of a search over `tried` layouts. `suggestions` is empty if none of them fits."""

    tried: int
    problem: str = ""
    suggestions: tuple[Suggestion, ...] = ()


@dataclass(frozen=True)
class _Search:
    """Estimates for layouts of one model on one cluster."""

    job: Job

    @cached_property
    def by_group(self) -> dict[str, Counter[str]]:
        """Weight elements by group: "embedding", "layer.<l>", "head", "mtp".

        They are divided by tp, replicated ("whole"), or in routed experts.
        """
        weights: dict[str, Counter[str]] = defaultdict(Counter)
        for bound in self.job.rows:
            if not is_parameter(bound) or (bound.row.copy_of_embedding and self.job.spec.arguments.tied_embeddings):
                continue
            kind = "experts" if bound.expert is not None else "whole" if bound.row.axis == "none" else "divided"
            weights[bound.group][kind] += sum(prod(shape) for shape in bound.row.shapes)
        return weights

    @cached_property
    def flops(self) -> float:
        size = model_size(self.job.spec.hf_config, self.job.rows)
        batch = batch_arithmetic(self.job.config, self.job.spec.layout)
        actor = replace(self.job.config.actor, recompute="none")
        epochs = self.job.config.trainer.update_epochs
        return step_flops(
            actor, epochs, self.job.spec.arguments, size, batch, predicts_tokens=self.job.predicts_tokens
        ).update

    def state(self, run: Execution, stage: int) -> RankState:
        """Estimate the state of a stage's ranks, without the padding of Megatron's buffers."""
        layout = run.layout
        layers = layout.stage_layers(self.job.spec.arguments.transformer["num_layers"])[stage]
        groups = [f"layer.{layer}" for chunk in layers for layer in chunk]
        groups += ["embedding"] if stage == 0 else []
        groups += ["head", "mtp"] if stage == layout.pp - 1 else []
        # With pipeline stages, the last stage has its own copy of a tied embedding.
        groups += ["embedding"] if self.job.spec.arguments.tied_embeddings and 0 < stage == layout.pp - 1 else []
        weights = sum((self.by_group[group] for group in groups), Counter[str]())
        dense = weights["divided"] // layout.tp + weights["whole"]
        experts = weights["experts"] // (layout.ep * layout.etp)
        sharded = run.section.distributed_optimizer
        owned = dense // (layout.dp * layout.cp if sharded else 1) + experts // (layout.edp if sharded else 1)
        return RankState.of(run, dense + experts, dense + experts, owned)

    @cached_property
    def recomputations(self) -> list[ActorConfig]:
        """The actor's configuration with each kind of recomputation, cheapest first."""
        actor, job = self.job.config.actor, self.job
        modules = recomputed_modules(replace(actor, recompute_modules=[]), job.spec.arguments, job.implementation)
        return [
            replace(actor, recompute="none"),
            replace(actor, recompute="selective", recompute_modules=modules),
            replace(actor, recompute="full"),
        ]

    def cheapest(self, layout: TrainLayout, *, host_optimizer: bool) -> tuple[ActorConfig, list[Phases]] | None:
        """Return the cheapest combination of recomputation and offloading that fits, with the estimated memory of the
        stages that can be the fullest. None if no combination fits, or if the optimizer cannot be on the host."""
        job, arguments, usable = self.job, self.job.spec.arguments, usable_bytes(self.job.config.cluster)
        # On CPU all state is in host memory anyway, and only a distributed optimizer can be moved (validation.py).
        if host_optimizer and not (job.run.cuda and job.config.actor.distributed_optimizer):
            return None
        optimizer = replace(job.config.actor.optimizer, cpu_offload=host_optimizer)
        # Offloading makes room for an engine on the same GPU.
        offloads = (WITH_HOST_OPTIMIZER if host_optimizer else OFFLOADS) if job.shared else OFFLOADS[:1]
        sizes = arguments.transformer
        largest = max(arguments.vocab_size, 2 * sizes["ffn_hidden_size"]) * sizes["hidden_size"] // layout.tp
        microbatches = batch_arithmetic(job.config, layout).most_microbatches
        for actor in self.recomputations:
            run = replace(job.run, section=actor, layout=layout)
            activations = {
                stage: stage_activations(
                    arguments,
                    stage,
                    run,
                    microbatches=microbatches,
                    largest_weight_elements=largest,
                    predicts_tokens=job.predicts_tokens,
                )
                for stage in _telling_stages(layout)
            }
            for offload in offloads:
                chosen = replace(actor, offload=offload, optimizer=optimizer)
                states = {stage: self.state(replace(run, section=chosen), stage) for stage in activations}
                phases = [
                    rank_phases(
                        offload, states[stage], saved, job.engine, shared=job.shared, models=job.colocated.widest
                    )
                    for stage, saved in activations.items()
                ]
                if not job.run.cuda or max(rank.peak_bytes for rank in phases) <= usable:
                    return replace(chosen, parallel=parallel_of(layout, chosen.parallel)), phases
        return None


def _telling_stages(layout: TrainLayout) -> list[int]:
    """Return the stages that can be the fullest: the first, the second and the last."""
    # Middle stages have no more layers than the second one and fewer micro-batches in flight.
    return sorted({0, min(1, layout.pp - 1), layout.pp - 1})


def suggest_layouts(config: Config, *, limit: int = 5) -> Suggestions:
    """Return the best `limit` layouts for the cluster and the batch of `config`. Its own layout is ignored.

    Raises: ConfigError for settings that are invalid in every layout.
    """
    reject_suggestions(config.actor)
    # Job.of checks the layout, so it gets one that fits every model.
    any_layout = ParallelConfig(sequence_parallel=config.actor.parallel.sequence_parallel)
    num_engines = _num_engines(config.cluster, config.rollout)
    search = _Search(
        Job.of(
            replace(
                config,
                actor=replace(config.actor, parallel=any_layout),
                rollout=replace(config.rollout, num_engines=num_engines),
            )
        )
    )
    if search.job.engine.sequences < 1:
        return Suggestions(0, "rollout.tp: an engine rank has no room for one sequence; raise it")
    layouts = list(candidate_layouts(search.job))
    # An optimizer on the host costs most, so it is tried only if nothing else fits.
    fitting = _fitting(search, layouts, host_optimizer=False) or _fitting(search, layouts, host_optimizer=True)
    for index, (suggestion, chosen) in enumerate(fitting[:limit]):
        plan = make_plan(replace(search.job.config, actor=chosen))
        if plan.fits:
            # The estimate lacks the padding of buffers.
            best = replace(suggestion, exact=True, peak_bytes=plan.fullest.phases.peak_bytes)
            found = [best, *(suggestion for suggestion, _ in fitting[index + 1 : index + limit])]
            if num_engines != config.rollout.num_engines:
                override = f"rollout.num_engines={num_engines}"
                found = [replace(each, overrides=(*each.overrides, override)) for each in found]
            return Suggestions(len(layouts), suggestions=tuple(found))
    problem = f"cluster.nodes={config.cluster.nodes}: none of {len(layouts)} layouts fits; raise it"
    return Suggestions(len(layouts), problem)


def _num_engines(cluster: ClusterConfig, rollout: RolloutConfig) -> int:
    """Return rollout.num_engines, lowered to the number that fits on the GPUs if they are shared."""
    most = max(cluster.nodes * cluster.gpus_per_node // rollout.tp, 1)
    return min(rollout.num_engines, most) if cluster.placement == "colocated" else rollout.num_engines


def _fitting(
    search: _Search, layouts: Sequence[TrainLayout], *, host_optimizer: bool
) -> list[tuple[Suggestion, ActorConfig]]:
    """Return the layouts that fit, fastest first."""
    fitting = []
    for layout in layouts:
        found = search.cheapest(layout, host_optimizer=host_optimizer)
        if found is not None:
            fitting.append((_describe(search, layout, *found), found[0]))
    return sorted(fitting, key=lambda pair: pair[0].estimated_step_seconds)


def _describe(search: _Search, layout: TrainLayout, actor: ActorConfig, phases: Sequence[Phases]) -> Suggestion:
    gives_up = []
    sparse = search.job.spec.arguments.transformer.get("num_moe_experts")
    costs = {"none": 0.0, "selective": SELECTIVE_COST if sparse else MLP_COST, "full": FULL_COST}
    added = costs[actor.recompute]
    if added:
        gives_up.append(f"{actor.recompute} recomputation: +{added:.0%} FLOP of an update")
    host_gib = max(rank.host_bytes for rank in phases) * search.job.config.cluster.gpus_per_node / GIB
    memory = f"{host_gib:.0f} GiB of host memory per node"
    # Gradients are dropped, not copied.
    if kept := [part for part in ("params", "optimizer") if getattr(actor.offload, part)]:
        gives_up.append(f"offload of {', '.join(kept)} while the engine generates: {memory}, and the copies")
    host_seconds = _host_seconds(search, layout) if actor.optimizer.cpu_offload else 0.0
    if actor.optimizer.cpu_offload:
        gives_up.append(f"optimizer on the host: {memory}, +{host_seconds:.0f} s per step")
    bubble = (layout.pp - 1) / batch_arithmetic(search.job.config, layout).microbatches
    if bubble > 0.02:
        gives_up.append(f"pipeline bubble: +{bubble:.0%} of an update")
    compute, messages = _compute(search, layout, added), _messages(search, layout)
    for message, seconds in messages.items():
        if seconds / compute > 0.1:
            gives_up.append(f"{message}: +{seconds / compute:.0%} of computing, unless it overlaps")
    values = {f"parallel.{key}": value for key, value in vars(actor.parallel).items()}
    values |= {"recompute": actor.recompute, "optimizer.cpu_offload": actor.optimizer.cpu_offload}
    if actor.recompute == "selective":
        values["recompute_modules"] = f"[{','.join(actor.recompute_modules)}]"
    values |= {f"offload.{part}": value for part, value in vars(actor.offload).items()}
    overrides = (f"actor.{key}={'null' if value is None else str(value).lower()}" for key, value in values.items())
    seconds = (compute + sum(messages.values())) * (1 + bubble) + host_seconds
    return Suggestion(tuple(overrides), seconds, max(rank.peak_bytes for rank in phases), tuple(gives_up))


def _compute(search: _Search, layout: TrainLayout, recompute: float) -> float:
    """Estimate the compute time of all updates of a step; the longest stage sets the pace."""
    plan, layers = search.job.config.plan, search.job.spec.arguments.transformer["num_layers"]
    rate = layout.world_size * (plan.peak_tflops or PEAK_TFLOPS) * 1e12 * plan.mfu_update
    longest = max(sum(map(len, chunks)) for chunks in layout.stage_layers(layers))
    sizes = search.job.spec.arguments.transformer
    units = sizes["moe_ffn_hidden_size"] / layout.etp if sizes.get("num_moe_experts") else 0
    narrow = 1 + THIN_UNITS / (units or sizes["ffn_hidden_size"] / layout.tp)
    return search.flops / rate * (1 + recompute) * longest * layout.pp / layers * narrow


def _messages(search: _Search, layout: TrainLayout) -> dict[str, float]:
    """Estimate the communication time of a step by kind."""
    job = search.job
    sizes, b, node = job.spec.arguments.transformer, job.run.element_bytes, job.config.cluster.gpus_per_node
    batch = batch_arithmetic(job.config, layout)
    tokens = batch.tokens * job.config.trainer.update_epochs / (layout.dp * layout.cp)
    layers, hidden = sizes["num_layers"] / layout.pp, sizes["hidden_size"]
    state = tokens * layers * hidden * b

    def seconds(num_bytes: float, span: int) -> float:
        return num_bytes / (NODE_BYTES_PER_SECOND if span <= node else NETWORK_BYTES_PER_SECOND)

    seconds_by_kind = {"tensor parallelism": seconds(4 * state * (layout.tp - 1) / layout.tp, layout.tp)}
    if sizes.get("num_moe_experts"):
        routed = 4 * state / layout.tp * sizes["moe_router_topk"] * ((layout.ep - 1) / layout.ep + layout.etp - 1)
        seconds_by_kind["expert dispatch"] = seconds(routed, layout.ep * layout.etp)
    keys = 2 * sizes["num_query_groups"] * sizes.get("kv_channels", 0) / layout.tp
    ring = 3 * tokens * layers * keys * b * (layout.cp - 1)
    seconds_by_kind["context parallelism"] = seconds(ring, layout.tp * layout.cp)
    run = replace(job.run, layout=layout)
    parameters = max(search.state(run, stage).parameters for stage in _telling_stages(layout))
    reduced = parameters * (4 + b) * batch.updates if layout.dp * layout.cp > 1 else 0.0
    seconds_by_kind["gradient reduction"] = seconds(reduced, layout.stage_size)
    return seconds_by_kind


def _host_seconds(search: _Search, layout: TrainLayout) -> float:
    """Estimate the time in which main parameters and moments travel to the GPU and back, for all updates of a step."""
    owned = sum(weights.total() for weights in search.by_group.values())
    moved = owned / layout.world_size * 2 * search.job.run.optimizer_bytes
    return moved * batch_arithmetic(search.job.config, layout).updates / HOST_BYTES_PER_SECOND
