"""`mcore-rl plan`: memory, FLOP and time of a run, computed before it starts and without a GPU."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from mcore_rl.config import Config, validate
from mcore_rl.config.roles import EngineRole, ModelRole
from mcore_rl.config.rules.defaults import resolve_dtype
from mcore_rl.config.rules.engine_support import cannot_run
from mcore_rl.config.rules.lora import uses_lora
from mcore_rl.errors import ConfigError, McoreRLError
from mcore_rl.megatron.model.model import DTYPES
from mcore_rl.planner.activations import Execution, StageActivations, stage_activations
from mcore_rl.planner.asynchronous.overlap import Overlap, overlap_of
from mcore_rl.planner.asynchronous.times import StepTimes
from mcore_rl.planner.batches import BatchArithmetic, batch_arithmetic
from mcore_rl.planner.colocated import ColocatedRanks, colocated_ranks
from mcore_rl.planner.engine import EngineRank, engine_rank, longest_sequence
from mcore_rl.planner.flops import StepFlops, StepSeconds, step_flops, step_seconds
from mcore_rl.planner.model_size import ModelSize, bound_rows, model_size, parameters_by_rank
from mcore_rl.planner.phases import Phases, rank_phases
from mcore_rl.planner.stages import stage_parameters
from mcore_rl.planner.state import Numerics, RankState, StageParameter, stage_state
from mcore_rl.planner.sync import WeightSync, weight_sync
from mcore_rl.planner.verdict import Verdict, compare_with_cluster
from mcore_rl.resolved.adapters import bound_adapters
from mcore_rl.resolved.engine_model import check_engine_model
from mcore_rl.resolved.implementation import Implementation
from mcore_rl.resolved.installed import planned_machine
from mcore_rl.resolved.model import ResolvedModel
from mcore_rl.resolved.recompute import recomputed_modules
from model_converters.errors import LayoutError
from model_converters.families.parts.family import ModelArguments
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.table import BoundRow


@dataclass(frozen=True)
class PlannedRank:
    """Memory of one trainer rank. Units: bytes."""

    rank: int
    stage: int
    state: RankState
    activation_bytes: int
    phases: Phases


@dataclass(frozen=True)
class Plan:
    """Result of `mcore-rl plan`; see docs/plan.md."""

    config: Config
    layout: TrainLayout
    size: ModelSize
    ranks: tuple[PlannedRank, ...]
    stages: tuple[StageActivations, ...]
    engine: EngineRank
    batch: BatchArithmetic
    flops: StepFlops
    seconds: StepSeconds
    sync: WeightSync
    verdict: Verdict

    @property
    def step_times(self) -> StepTimes:
        return StepTimes(self.config, self.flops, self.batch, self.engine)

    @property
    def overlap(self) -> Overlap | None:
        """Overlap of generation and training; None for a synchronous run."""
        return overlap_of(self.step_times, self.layout, self.sync)

    @property
    def fits(self) -> bool:
        return not self.verdict.errors

    @property
    def cannot_run(self) -> list[str]:
        """Features that the run needs and this version does not have."""
        return cannot_run(self.config)

    @property
    def fullest(self) -> PlannedRank:
        return max(self.ranks, key=lambda planned: planned.phases.peak_bytes)

    def to_json(self) -> dict[str, Any]:
        """Return the documented keys and the other values of the printed tables."""
        return {
            "fits": self.fits,
            "world_size": self.layout.world_size,
            "parameters_total": self.size.total,
            "parameters_active": self.size.active,
            "per_rank": [_rank_json(planned) for planned in self.ranks],
            "fullest_rank": self.fullest.rank,
            "weight_sync": asdict(self.sync),
            "cannot_run": self.cannot_run,
            "errors": list(self.verdict.errors),
            "warnings": list(self.verdict.warnings),
            "layout": asdict(self.layout) | {"dp": self.layout.dp, "edp": self.layout.edp},
            "activations_by_stage": [
                {name: int(value) for name, value in stage.components.items()} for stage in self.stages
            ],
            "engine": asdict(self.engine),
            "host_bytes_per_node": self.verdict.host_bytes_per_node,
            "batch": asdict(self.batch),
            "flops": asdict(self.flops),
            "seconds": asdict(self.seconds),
            "asynchronous": None if (overlap := self.overlap) is None else overlap.to_json(),
        }


def _rank_json(planned: PlannedRank) -> dict[str, Any]:
    state = planned.state
    return {
        "rank": planned.rank,
        "stage": planned.stage,
        "parameters": state.parameters,
        "state_bytes": state.total_bytes,
        "weights_bytes": state.weights_bytes,
        "gradients_bytes": state.gradients_bytes,
        "optimizer_bytes": state.optimizer_bytes,
        "activation_bytes": planned.activation_bytes,
        "peak_bytes": planned.phases.peak_bytes,
        "phases": planned.phases.by_name,
    }


@dataclass(frozen=True)
class Job:
    """A checked configuration, with the resolved model that all parts of a plan use.

    `adapters` is the weight table of the LoRA adapters, if any are trained. `cuda`: plan for GPUs; true for
    device=auto. `colocated` are the models that share GPUs with the policy.
    """

    config: Config
    spec: ResolvedModel
    implementation: Implementation
    rows: list[BoundRow]
    adapters: list[BoundRow]
    cuda: bool
    colocated: ColocatedRanks

    @classmethod
    def of(cls, config: Config) -> Job:
        """Check the configuration and resolve the model.

        Raises: ConfigError for a run that cannot work on any machine.
        """
        validate(config, run_here=False)
        cuda = config.cluster.device != "cpu"
        # Copied because resolve_dtype must not change the caller's configuration.
        config = replace(config, model=replace(config.model))
        resolve_dtype(config.model, cuda=cuda)
        spec = ResolvedModel.policy(config)
        check_engine_model(EngineRole.rollout(config), config.algorithm, spec.hf_config)
        installed = planned_machine(cuda=cuda)
        implementation = spec.implementation(ModelRole.policy(config), config.cluster.gpus_per_node, installed)
        dtype, lora = DTYPES[config.model.dtype], config.actor.lora
        modules = recomputed_modules(config.actor, spec.arguments, implementation)
        config = replace(config, actor=replace(config.actor, recompute_modules=modules))
        rows = bound_rows(spec.hf_config, dtype)
        adapters = bound_adapters(lora, spec.hf_config, dtype) if uses_lora(config.actor) else []
        return cls(config, spec, implementation, rows, adapters, cuda, colocated_ranks(config, cuda=cuda))

    @property
    def hf_config(self) -> dict[str, Any]:
        return self.spec.hf_config

    @property
    def arguments(self) -> ModelArguments:
        return self.spec.arguments

    @property
    def layout(self) -> TrainLayout:
        return self.spec.layout

    @property
    def element_bytes(self) -> int:
        return int(DTYPES[self.config.model.dtype].itemsize)

    @property
    def numerics(self) -> Numerics:
        return Numerics.of(self.config.actor, DTYPES[self.config.model.dtype], fused_optimizer=self.cuda)

    @property
    def shared(self) -> bool:
        """True if a trainer rank and an engine rank share each GPU."""
        return self.cuda and self.config.cluster.placement == "colocated"

    def execution(self) -> Execution:
        """Describe the execution of the policy's layers."""
        return Execution.of(
            self.config.actor,
            self.config.plan,
            self.layout,
            longest=longest_sequence(self.config.rollout),
            element_bytes=self.element_bytes,
            fused=self.implementation.transformer_engine,
        )

    def engine_rank(self) -> EngineRank:
        """Compute the bytes of the fullest rank of a rollout engine."""
        rollout, cluster = self.config.rollout, self.config.cluster
        return engine_rank(
            rollout, cluster, self.rows, self.arguments, element_bytes=self.element_bytes, cuda=self.cuda
        )


def make_plan(config: Config) -> Plan:
    """Plan a run. Builds every pipeline stage of the model once, on the meta device.

    Raises: ConfigError for a layout or setting that cannot work.
    """
    job = Job.of(config)
    try:
        num_parameters = parameters_by_rank([*job.rows, *job.adapters], job.layout)
    except LayoutError as error:
        raise ConfigError(f"actor.parallel: {error}") from error
    batch = batch_arithmetic(config, job.layout)
    engine = job.engine_rank()
    ranks: list[PlannedRank] = []
    stages = []
    for stage in range(job.layout.pp):
        chunks = stage_parameters(job.hf_config, job.layout, stage, lora=config.actor.lora)
        stages.append(planned_activations(job, stage, chunks, batch))
        ranks += planned_stage(job, stage, chunks, stages[-1], engine)
    # Two independent counts: an error in the built stages or in the weight table must not go into the plan unnoticed.
    _check_counts([planned.state.parameters for planned in ranks], num_parameters)
    size = model_size(job.hf_config, job.rows)
    sync = weight_sync(config, job.rows, job.layout, cuda=job.cuda)
    flops = step_flops(config.actor, config.trainer.update_epochs, job.arguments, size, batch)
    seconds = step_seconds(config.plan, config.rollout, flops, batch, engine, job.layout.world_size)
    phases = [planned.phases for planned in ranks]
    verdict = compare_with_cluster(config, job.layout, phases, engine, batch, sync, cuda=job.cuda)
    return Plan(config, job.layout, size, tuple(ranks), tuple(stages), engine, batch, flops, seconds, sync, verdict)


def planned_activations(
    job: Job, stage: int, chunks: list[list[StageParameter]], batch: BatchArithmetic
) -> StageActivations:
    """Compute the peak activations of an update on the ranks of a stage."""
    largest = max((parameter.elements for chunk in chunks for parameter in chunk if parameter.trained), default=0)
    return stage_activations(
        job.arguments,
        stage,
        job.execution(),
        section=job.config.actor,
        microbatches=batch.most_microbatches,
        largest_weight_elements=largest,
    )


def planned_stage(
    job: Job, stage: int, chunks: list[list[StageParameter]], activations: StageActivations, engine: EngineRank
) -> list[PlannedRank]:
    """Plan every rank of a stage."""
    first = stage * job.layout.stage_size
    total, ranks = int(activations.total_bytes), []
    for rank, state in enumerate(stage_state(chunks, job.layout, stage, job.numerics), first):
        models = job.colocated.at(rank)
        phases = rank_phases(job.config.actor.offload, state, activations, engine, shared=job.shared, models=models)
        ranks.append(PlannedRank(rank, stage, state, total, phases))
    return ranks


def _check_counts(built: list[int], by_table: np.ndarray) -> None:
    """Check the parameters of the built stages against the weight table, for every rank.

    Raises: McoreRLError.
    """
    wrong = np.flatnonzero(np.asarray(built) != by_table)
    if len(wrong):
        rank = int(wrong[0])
        raise McoreRLError(
            f"rank {rank} holds {by_table[rank]} parameters by the weight table, but its stage was built with "
            f"{built[rank]}"
        )
