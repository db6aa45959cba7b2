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

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from mcore_rl.config.models import ActorConfig, OffloadConfig, ParallelConfig
from mcore_rl.config.rules.lora import reject_suggestions
from mcore_rl.config.schema import ClusterConfig, Config, RolloutConfig
from mcore_rl.planner.activations import StageActivations, stage_activations
from mcore_rl.planner.batches import batch_arithmetic
from mcore_rl.planner.candidates import candidate_layouts, parallel_of
from mcore_rl.planner.engine import GIB, EngineRank
from mcore_rl.planner.flops import step_flops
from mcore_rl.planner.model_size import is_parameter, model_size
from mcore_rl.planner.phases import Phases, rank_phases, usable_bytes
from mcore_rl.planner.plan import Job, make_plan
from mcore_rl.planner.state import Numerics, RankState
from mcore_rl.resolved.recompute import recomputed_modules
from model_converters.mapping.layout import TrainLayout

PEAK_TFLOPS = 989.0
"""Peak of an H100 in bfloat16, used if plan.peak_tflops is not set."""
NODE_BYTES_PER_SECOND, NETWORK_BYTES_PER_SECOND = 200e9, 40e9
"""Bandwidth of one GPU in collectives: NVLink within a node, 400 Gbit/s InfiniBand between nodes."""
THIN_UNITS = 256
"""Units of an expert or MLP on one rank with which its matrix products reach half of the rate of wide ones."""
HOST_BYTES_PER_SECOND = 25e9
"""One GPU's share of the bandwidth of PCIe and host memory."""
OFFLOADS = (
    OffloadConfig(),
    OffloadConfig(optimizer=True),
    OffloadConfig(optimizer=True, grads=True),
    OffloadConfig(optimizer=True, grads=True, params=True),
)
WITH_HOST_OPTIMIZER = (OffloadConfig(), OffloadConfig(grads=True), OffloadConfig(grads=True, params=True))
SELECTIVE_COST, MLP_COST, FULL_COST = 0.05, 0.2, 1 / 3
"""Additional FLOP of an update: cheap modules recomputed, dense MLPs recomputed, everything recomputed."""


@dataclass(frozen=True)
class Suggestion:
    """A layout that fits, with the keys to set (`overrides`). `exact`: confirmed by an exact plan."""

    overrides: tuple[str, ...]
    seconds: float
    peak_bytes: int
    gives_up: tuple[str, ...]
    exact: bool = False


@dataclass(frozen=True)
class Suggestions:
    """Result of a search over `tried` layouts. `suggestions` is empty if none of them fits."""

    suggestions: tuple[Suggestion, ...]
    tried: int
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "tried": self.tried,
            "problem": self.problem,
            "suggestions": [
                {
                    "overrides": list(suggestion.overrides),
                    "estimated_step_seconds": suggestion.seconds,
                    "peak_bytes": suggestion.peak_bytes,
                    "gives_up": list(suggestion.gives_up),
                    "exact": suggestion.exact,
                }
                for suggestion in self.suggestions
            ],
        }


@dataclass(frozen=True)
class _Weights:
    """Weight elements of a group of layers: divided by tp, replicated (`whole`), and in routed experts."""

    divided: int = 0
    whole: int = 0
    experts: int = 0

    def __add__(self, other: _Weights) -> _Weights:
        return _Weights(self.divided + other.divided, self.whole + other.whole, self.experts + other.experts)


@dataclass(frozen=True)
class _Search:
    """Estimates for layouts of one model on one cluster."""

    job: Job

    @cached_property
    def by_group(self) -> dict[str, _Weights]:
        """Weights by group: "embedding", "layer.<l>", "head", "mtp"."""
        weights: dict[str, _Weights] = {}
        for bound in self.job.rows:
            if not is_parameter(bound) or (bound.row.copy_of_embedding and self.job.arguments.tied_embeddings):
                continue
            elements = sum(prod(shape) for shape in bound.row.shapes)
            kind = "experts" if bound.expert is not None else "whole" if bound.row.axis == "none" else "divided"
            weights[bound.group] = weights.get(bound.group, _Weights()) + replace(_Weights(), **{kind: elements})
        return weights

    @cached_property
    def flops(self) -> float:
        config = self.job.config
        size = model_size(self.job.hf_config, self.job.rows)
        batch = batch_arithmetic(config, self.job.layout)
        actor = _with(config.actor, recompute="none")
        return step_flops(actor, config.trainer.update_epochs, self.job.arguments, size, batch).update

    @cached_property
    def engine(self) -> EngineRank:
        return self.job.engine_rank()

    def stage_weights(self, layout: TrainLayout, stage: int) -> _Weights:
        layers = layout.stage_layers(self.job.arguments.transformer["num_layers"])[stage]
        groups = [f"layer.{layer}" for chunk in layers for layer in chunk]
        groups += ["embedding"] if stage == 0 else []
        groups += ["head", "mtp"] if stage == layout.pp - 1 else []
        total = sum((self.by_group[group] for group in groups if group in self.by_group), _Weights())
        # With pipeline stages, the last stage has its own copy of a tied embedding.
        tied = self.job.arguments.tied_embeddings and layout.pp > 1 and stage == layout.pp - 1
        return total + self.by_group["embedding"] if tied else total

    def state(self, layout: TrainLayout, stage: int, numerics: Numerics) -> RankState:
        """Estimate the state of a stage's ranks, without the padding of Megatron's buffers."""
        weights = self.stage_weights(layout, stage)
        dense = weights.divided // layout.tp + weights.whole
        experts = weights.experts // (layout.ep * layout.etp)
        sharded = numerics.distributed_optimizer
        owned = dense // (layout.dp * layout.cp if sharded else 1) + experts // (layout.edp if sharded else 1)
        parameters = dense + experts
        return RankState.of(numerics, parameters, parameters, owned)

    def variants(self, *, host_optimizer: bool) -> list[ActorConfig]:
        """List the combinations of recomputation and offloading, cheapest first.

        The list is empty if the optimizer should be on the host and cannot be.
        """
        actor, job = self.job.config.actor, self.job
        if host_optimizer and not (job.cuda and actor.distributed_optimizer):
            return []
        variants = []
        for recompute, modules in self.recomputations():
            for offload in (WITH_HOST_OPTIMIZER if host_optimizer else OFFLOADS) if job.shared else OFFLOADS[:1]:
                chosen = _with(actor, recompute=recompute, modules=modules, offload=offload)
                chosen.optimizer.cpu_offload = host_optimizer
                variants.append(chosen)
        return variants

    def phases(
        self, actor: ActorConfig, layout: TrainLayout, cache: dict[tuple[str, int], StageActivations]
    ) -> list[Phases]:
        """Estimate the stages that can be the fullest: the first, the second and the last.

        `cache` holds activations of this layout by (recomputation, stage).
        """
        job = replace(
            self.job, config=replace(self.job.config, actor=actor), spec=replace(self.job.spec, layout=layout)
        )
        phases_by_stage = []
        for stage in sorted({0, min(1, layout.pp - 1), layout.pp - 1}):
            key = actor.recompute, stage
            if key not in cache:
                cache[key] = stage_activations(
                    job.arguments,
                    stage,
                    job.execution(),
                    section=actor,
                    microbatches=batch_arithmetic(job.config, layout).most_microbatches,
                    largest_weight_elements=max(self._vocabulary(layout), self._expert_weight(layout)),
                )
            state = self.state(layout, stage, job.numerics)
            models = job.colocated.widest
            phases_by_stage.append(
                rank_phases(actor.offload, state, cache[key], self.engine, shared=job.shared, models=models)
            )
        return phases_by_stage

    def _vocabulary(self, layout: TrainLayout) -> int:
        arguments = self.job.arguments
        return int(arguments.vocab_size * arguments.transformer["hidden_size"] // layout.tp)

    def _expert_weight(self, layout: TrainLayout) -> int:
        sizes = self.job.arguments.transformer
        return int(2 * sizes["ffn_hidden_size"] * sizes["hidden_size"] // layout.tp)

    def recomputations(self) -> list[tuple[str, list[str]]]:
        """List the recomputation settings, from none to full."""
        by_model = replace(self.job.config.actor, recompute_modules=[])
        modules = recomputed_modules(by_model, self.job.arguments, self.job.implementation)
        return [("none", []), ("selective", modules), ("full", [])]


def suggest_layouts(config: Config, *, limit: int = 5) -> Suggestions:
    """Return the best `limit` layouts for the cluster and the batch of `config`. Its own layout is ignored.

    Raises: ConfigError for settings that are invalid in every layout.
    """
    reject_suggestions(config.actor)
    base = deepcopy(config)
    # Job.of checks the layout, so it gets one that fits every model.
    base.actor.parallel = ParallelConfig(sequence_parallel=config.actor.parallel.sequence_parallel)
    extra = _fit_engines(base.cluster, base.rollout)
    search = _Search(Job.of(base))
    if search.engine.sequences < 1:
        return Suggestions((), 0, "rollout.tp: an engine rank has no room for one sequence; raise it")
    layouts = list(candidate_layouts(search.job))
    # An optimizer on the host costs most, so it is tried only if nothing else fits.
    fitting = _fitting(search, layouts, host_optimizer=False) or _fitting(search, layouts, host_optimizer=True)
    for index, (_, chosen) in enumerate(fitting[:limit]):
        plan = make_plan(replace(search.job.config, actor=chosen))
        if plan.fits:
            best = replace(fitting[index][0], exact=True, peak_bytes=plan.fullest.phases.peak_bytes)
            rest = [suggestion for suggestion, _ in fitting[index + 1 : index + limit]]
            return Suggestions(tuple(_also(suggestion, extra) for suggestion in [best, *rest]), len(layouts))
    problem = f"cluster.nodes={config.cluster.nodes}: none of {len(layouts)} layouts fits; raise it"
    return Suggestions((), len(layouts), problem)


def _fit_engines(cluster: ClusterConfig, rollout: RolloutConfig) -> tuple[str, ...]:
    """Lower rollout.num_engines to the number that fits on the GPUs; return the override, if any."""
    slots = cluster.nodes * cluster.gpus_per_node
    most = max(slots // rollout.tp, 1)
    if cluster.placement != "colocated" or rollout.num_engines <= most:
        return ()
    rollout.num_engines = most
    return (f"rollout.num_engines={most}",)


def _also(suggestion: Suggestion, overrides: tuple[str, ...]) -> Suggestion:
    return replace(suggestion, overrides=(*suggestion.overrides, *overrides))


def _fitting(
    search: _Search, layouts: Sequence[TrainLayout], *, host_optimizer: bool
) -> list[tuple[Suggestion, ActorConfig]]:
    """Return the layouts that fit, fastest first."""
    variants = search.variants(host_optimizer=host_optimizer)
    fitting = [best for layout in layouts if (best := _best(search, layout, variants)) is not None]
    return sorted(fitting, key=lambda pair: pair[0].seconds)


def _best(
    search: _Search, layout: TrainLayout, variants: Sequence[ActorConfig]
) -> tuple[Suggestion, ActorConfig] | None:
    """Return the first variant that fits, or None."""
    cache: dict[tuple[str, int], StageActivations] = {}
    usable = usable_bytes(search.job.config.cluster)
    for variant in variants:
        phases = search.phases(variant, layout, cache)
        if not search.job.cuda or max(rank.peak_bytes for rank in phases) <= usable:
            chosen = deepcopy(variant)
            chosen.parallel = parallel_of(layout, variant.parallel)
            return _describe(search, layout, chosen, phases), chosen
    return None


def _with(
    actor: ActorConfig, *, recompute: str, modules: Sequence[str] = (), offload: OffloadConfig | None = None
) -> ActorConfig:
    chosen = deepcopy(actor)
    chosen.recompute = recompute
    if modules:
        chosen.recompute_modules = list(modules)
    if offload is not None:
        chosen.offload = deepcopy(offload)
    return chosen


def _describe(search: _Search, layout: TrainLayout, actor: ActorConfig, phases: Sequence[Phases]) -> Suggestion:
    gives_up = []
    host_gib = _host_gib(search.job.config.cluster, phases)
    added = _recompute_cost(search, actor.recompute)
    if added:
        gives_up.append(f"{actor.recompute} recomputation: +{added:.0%} FLOP of an update")
    away = [part for part in ("params", "grads", "optimizer") if getattr(actor.offload, part)]
    kept = [part for part in away if part != "grads"]  # gradients are dropped, not copied
    if kept:
        memory = f"{host_gib:.0f} GiB of host memory per node"
        gives_up.append(f"offload of {', '.join(kept)} while the engine generates: {memory}, and the copies")
    if actor.optimizer.cpu_offload:
        gives_up.append(
            f"optimizer on the host: {host_gib:.0f} GiB of host memory per "
            f"node, +{_host_seconds(search, layout):.0f} s per step"
        )
    bubble = _bubble(search, layout)
    if bubble > 0.02:
        gives_up.append(f"pipeline bubble: +{bubble:.0%} of an update")
    for message, seconds in _messages(search, layout).items():
        share = seconds / _compute(search, layout, added)
        if share > 0.1:
            gives_up.append(f"{message}: +{share:.0%} of computing, unless it overlaps")
    overrides = [f"actor.parallel.{key}={_shown(value)}" for key, value in vars(actor.parallel).items()]
    overrides.append(f"actor.recompute={actor.recompute}")
    overrides.append(f"actor.optimizer.cpu_offload={str(actor.optimizer.cpu_offload).lower()}")
    if actor.recompute == "selective":
        overrides.append(f"actor.recompute_modules=[{','.join(actor.recompute_modules)}]")
    overrides += [f"actor.offload.{part}={str(part in away).lower()}" for part in ("params", "grads", "optimizer")]
    seconds = (_compute(search, layout, added) + sum(_messages(search, layout).values())) * (1 + bubble)
    seconds += _host_seconds(search, layout) if actor.optimizer.cpu_offload else 0.0
    return Suggestion(tuple(overrides), seconds, max(rank.peak_bytes for rank in phases), tuple(gives_up))


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower()


def _host_gib(cluster: ClusterConfig, phases: Sequence[Phases]) -> float:
    return max(rank.host_bytes for rank in phases) * cluster.gpus_per_node / GIB


def _recompute_cost(search: _Search, recompute: str) -> float:
    if recompute == "full":
        return FULL_COST
    if recompute == "none":
        return 0.0
    return SELECTIVE_COST if search.job.arguments.transformer.get("num_moe_experts") else MLP_COST


def _bubble(search: _Search, layout: TrainLayout) -> float:
    return (layout.pp - 1) / batch_arithmetic(search.job.config, layout).microbatches


def _compute(search: _Search, layout: TrainLayout, recompute: float) -> float:
    """Estimate the compute time of all updates of a step; the longest stage sets the pace."""
    plan, layers = search.job.config.plan, search.job.arguments.transformer["num_layers"]
    rate = layout.world_size * (plan.peak_tflops or PEAK_TFLOPS) * 1e12 * plan.mfu_update
    longest = max(sum(map(len, chunks)) for chunks in layout.stage_layers(layers))
    sizes = search.job.arguments.transformer
    units = sizes["moe_ffn_hidden_size"] / layout.etp if sizes.get("num_moe_experts") else 0
    narrow = 1 + THIN_UNITS / (units or sizes["ffn_hidden_size"] / layout.tp)
    return search.flops / rate * (1 + recompute) * longest * layout.pp / layers * narrow


def _messages(search: _Search, layout: TrainLayout) -> dict[str, float]:
    """Estimate the communication time of a step by kind."""
    job = search.job
    sizes, b, node = job.arguments.transformer, job.element_bytes, job.config.cluster.gpus_per_node
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
    parameters = _most_parameters(search, layout)
    reduced = parameters * (4 + b) * batch.updates if layout.dp * layout.cp > 1 else 0.0
    seconds_by_kind["gradient reduction"] = seconds(reduced, layout.stage_size)
    return seconds_by_kind


def _most_parameters(search: _Search, layout: TrainLayout) -> int:
    """Return the parameters of a rank of the fullest stage."""
    stages = {0, min(1, layout.pp - 1), layout.pp - 1}
    return max(search.state(layout, stage, search.job.numerics).parameters for stage in stages)


def _host_seconds(search: _Search, layout: TrainLayout) -> float:
    """Estimate the time in which main parameters and moments travel to the GPU and back, for all updates of a step."""
    owned = sum(weights.divided + weights.whole + weights.experts for weights in search.by_group.values())
    updates = batch_arithmetic(search.job.config, layout).updates
    return owned / layout.world_size * 2 * search.job.numerics.optimizer_bytes * updates / HOST_BYTES_PER_SECOND
