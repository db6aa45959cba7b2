"""`mcore-rl plan`: memory, FLOP and time of a run, computed before it starts and without a GPU."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import numpy as np

from mcore_rl.config.algorithm import is_supervised
from mcore_rl.config.roles import EngineRole
from mcore_rl.config.rules.engine_support import cannot_run
from mcore_rl.config.rules.models import uses_lora
from mcore_rl.config.rules.objective import trains_scores
from mcore_rl.config.rules.validation import validate
from mcore_rl.config.schema import Config, resolved_dtype
from mcore_rl.errors import McoreRLError
from mcore_rl.megatron.model.model import DTYPES
from mcore_rl.megatron.model.output import PolicyModel
from mcore_rl.megatron.model.value_model import ValueModel
from mcore_rl.planner.activations import StageActivations
from mcore_rl.planner.colocated import ColocatedRanks, colocated_ranks
from mcore_rl.planner.engine import EngineRank, engine_rank, longest_sequence
from mcore_rl.planner.layers.execution import Execution
from mcore_rl.planner.model_size import ModelSize, bound_rows, model_size, parameters_by_rank
from mcore_rl.planner.overlap import Overlap, overlap_of
from mcore_rl.planner.phases import Phases, rank_phases
from mcore_rl.planner.stages import execution_of, planned_stages
from mcore_rl.planner.state import RankState
from mcore_rl.planner.sync import WeightSync, weight_sync
from mcore_rl.planner.times import StepSeconds, StepTimes
from mcore_rl.planner.verdict import Verdict, compare_with_cluster
from mcore_rl.planner.workload import (
    batch_arithmetic,
    passes_before_updates,
    step_flops,
    teacher_flops,
    with_value_models,
)
from mcore_rl.resolved.adapters import bound_adapters
from mcore_rl.resolved.implementation import Implementation
from mcore_rl.resolved.installed import planned_machine
from mcore_rl.resolved.layout import conversion_errors
from mcore_rl.resolved.model import ResolvedModel, check_policy_engines, trained_model
from mcore_rl.weights.frozen import TrainedWeights, frozen_rows
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

    layout: TrainLayout
    size: ModelSize
    ranks: tuple[PlannedRank, ...]
    stages: tuple[StageActivations, ...]
    times: StepTimes
    sync: WeightSync
    verdict: Verdict

    @property
    def seconds(self) -> StepSeconds:
        """Time of each phase of a synchronous step."""
        return self.times.synchronous(self.layout.world_size, self.times.config.rollout.num_engines)

    @property
    def overlap(self) -> Overlap | None:
        """Overlap of generation and training; None for a synchronous run."""
        return overlap_of(self.times, self.layout, self.sync)

    @property
    def fits(self) -> bool:
        return not self.verdict.errors

    @property
    def cannot_run(self) -> list[str]:
        """Features that the run needs and this version does not have."""
        return cannot_run(self.times.config)

    @property
    def fullest(self) -> PlannedRank:
        return max(self.ranks, key=lambda planned: planned.phases.peak_bytes)

    def to_json(self) -> dict[str, object]:
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
            "engine": asdict(self.times.engine),
            "engines": 0 if is_supervised(self.times.config.algorithm) else self.times.config.rollout.num_engines,
            "host_bytes_per_node": self.verdict.host.total,
            "host_bytes": asdict(self.verdict.host),
            "batch": asdict(self.times.batch),
            "flops": asdict(self.times.flops),
            "seconds": asdict(self.seconds),
            "asynchronous": None if (overlap := self.overlap) is None else asdict(overlap),
        }


def _rank_json(planned: PlannedRank) -> dict[str, object]:
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

    `adapters` is the weight table of the LoRA adapters, if any are trained. `colocated` are the models that share GPUs
    with the policy. `kind` is the class of the model: a reward model is a ValueModel. The plan is for GPUs (`run.cuda`)
    unless device=cpu.
    """

    config: Config
    spec: ResolvedModel
    implementation: Implementation
    run: Execution
    rows: list[BoundRow]
    adapters: list[BoundRow]
    engine: EngineRank
    colocated: ColocatedRanks
    kind: type[PolicyModel] = PolicyModel

    @classmethod
    def of(cls, config: Config) -> Job:
        """Check the configuration and resolve the model.

        Raises: ConfigError for a run that cannot work on any machine.
        """
        # A plan with device=auto is for GPUs, even if this machine has none.
        cuda = config.cluster.device != "cpu"
        config = replace(config, cluster=replace(config.cluster, device="cuda" if cuda else "cpu"))
        validate(config, run_here=False)
        dtype = resolved_dtype(config.model.dtype, cuda=cuda)
        config = replace(config, model=replace(config.model, dtype=dtype))
        spec, scores = trained_model(config), trains_scores(config)
        check_policy_engines(EngineRole.rollout(config.rollout, config.model), config.algorithm, spec)
        implementation = spec.implementation(config.cluster.gpus_per_node, planned_machine(cuda=cuda))
        longest, dtype = longest_sequence(config.rollout), DTYPES[config.model.dtype]
        run = execution_of(spec, implementation, config.plan, longest=longest, cuda=cuda)
        run = replace(run, masked=config.rollout.keep_sampling_mask)
        # The search for layouts starts from the resolved modules of recomputation.
        config = replace(config, actor=run.section)
        rows = bound_rows(spec.hf_config, dtype, layout=spec.layout, has_value_head=scores)
        lora = config.actor.lora
        adapters = bound_adapters(lora, spec.hf_config, dtype, spec.layout) if uses_lora(config.actor) else []
        engine = engine_rank(
            config.rollout,
            config.cluster,
            rows,
            spec.arguments,
            element_bytes=dtype.itemsize,
            cuda=cuda,
            captures_routing=config.actor.moe.router_replay == "engine",
            float32_head=config.model.float32_head,
        )
        colocated = colocated_ranks(config, spec, cuda=cuda)
        return cls(
            config, spec, implementation, run, rows, adapters, engine, colocated, ValueModel if scores else PolicyModel
        )

    @property
    def predicts_tokens(self) -> bool:
        """False for a model with a value head."""
        return not issubclass(self.kind, ValueModel)

    @property
    def shared(self) -> bool:
        """True if a trainer rank and an engine rank share each GPU. Supervised runs have no engines."""
        colocated = self.config.cluster.placement == "colocated" and not is_supervised(self.config.algorithm)
        return self.run.cuda and colocated


def make_plan(config: Config) -> Plan:
    """Plan a run. Builds every pipeline stage of the model once, on the meta device.

    Raises: ConfigError for a layout or setting that cannot work.
    """
    job = Job.of(config)
    layout, cuda = job.spec.layout, job.run.cuda
    with conversion_errors("actor.parallel: "):
        num_parameters = parameters_by_rank([*job.rows, *job.adapters], layout)
    batch = batch_arithmetic(config, layout)
    ranks: list[PlannedRank] = []
    stages = []
    for stage, (activations, states) in enumerate(planned_stages(job.spec, job.run, batch.most_microbatches, job.kind)):
        stages.append(activations)
        for state in states:
            models = job.colocated.at(len(ranks))
            use = rank_phases(config.actor.offload, state, activations, job.engine, shared=job.shared, models=models)
            ranks.append(PlannedRank(len(ranks), stage, state, int(activations.total_bytes), use))
    # Two independent counts: an error in the built stages or in the weight table must not go into the plan unnoticed.
    _check_counts([planned.state.parameters for planned in ranks], num_parameters)
    size = model_size(job.spec.hf_config, job.rows)
    frozen = frozen_rows(job.spec.hf_config, layout, TrainedWeights.of(config.actor))
    sync = weight_sync(config, job.rows, layout, cuda=cuda, frozen=frozen)
    flops = step_flops(
        config.actor,
        config.trainer.update_epochs,
        job.spec.arguments,
        size,
        batch,
        passes=passes_before_updates(config, batch),
        predicts_tokens=job.predicts_tokens,
    )
    if is_supervised(config.algorithm):
        flops = replace(flops, generate=0.0)
    flops = replace(flops, teacher=teacher_flops(job.config, batch))
    flops = with_value_models(flops, job.config, batch, cuda=cuda)
    times = StepTimes(config, flops, batch, job.engine)
    phases = [planned.phases for planned in ranks]
    verdict = compare_with_cluster(config, layout, phases, job.engine, batch, sync, cuda=cuda)
    return Plan(layout, size, tuple(ranks), tuple(stages), times, sync, verdict)


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
