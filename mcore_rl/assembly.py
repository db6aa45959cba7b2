"""Composition root: connects the trainer's Protocols with their implementations. Only commands import it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from mcore_rl.algorithms.filters import groups_with_variance
from mcore_rl.config.models import TeacherConfig
from mcore_rl.config.reward import NO_RULE, STEP, RewardConfig
from mcore_rl.config.rules.objective import trains_scores
from mcore_rl.config.rules.rollout import concurrent_episodes
from mcore_rl.config.schema import Config
from mcore_rl.data.kept_steps.writers import ResponseWriter
from mcore_rl.data.records import remove_unjoined
from mcore_rl.model_check import model_check
from mcore_rl.observe.journal import RunJournal
from mcore_rl.observe.memory_report import GIB, MemoryReport
from mcore_rl.observe.report.background import ReportProcess
from mcore_rl.observe.screen.board import Board
from mcore_rl.observe.signs import Sign, signs_for
from mcore_rl.ports import Publisher, Validator
from mcore_rl.preparation.prepare import Prepared, PreparedModels
from mcore_rl.role_groups import critic_roles, group_of, rank_map, roles_of, teacher_of, teacher_roles
from mcore_rl.rollout.collector import GroupSource, RolloutCollector, RolloutPool
from mcore_rl.rollout.results import GradingFailures
from mcore_rl.rollout.scored_pool import ScoredPool, WeightedScorer
from mcore_rl.rollout.streaming.collector import ScoreTasks, StreamingCollector, SwappingPublisher
from mcore_rl.rollout.streaming.replay import read_replay
from mcore_rl.rollout.validator import RolloutValidator, probe_task
from mcore_rl.runtime.engines.fleet import Fleet
from mcore_rl.runtime.engines.scheduler import Scheduler
from mcore_rl.runtime.launch import RunProcesses, launch, launch_engines
from mcore_rl.runtime.phases import DevicePhases, StagedCollector, StagedValidator, Stages, takes_turns
from mcore_rl.runtime.publisher import SlicePublisher
from mcore_rl.runtime.roles.critic import CriticGroup
from mcore_rl.runtime.roles.groups import RoleGroup
from mcore_rl.runtime.roles.judge import JudgeGroup
from mcore_rl.runtime.roles.reward_model import RewardModelGroup
from mcore_rl.runtime.spans import SpanRecorder
from mcore_rl.runtime.step_profiler import StepProfiler
from mcore_rl.runtime.stops import STOPS
from mcore_rl.sandbox.confinement.memory import groups_removed
from mcore_rl.text_objectives import text_objective
from mcore_rl.trainer.batches import BatchBuilder, describe, recorded_batches
from mcore_rl.trainer.checkpoints import Checkpoints
from mcore_rl.trainer.copies import CheckpointCopies
from mcore_rl.trainer.logp_gap import LogpGapCheck
from mcore_rl.trainer.reference import build_controllers
from mcore_rl.trainer.repetition import Repetition
from mcore_rl.trainer.run import Run, SupervisedRun
from mcore_rl.types import Batch, BuffersRef, Groups, Metric, RolloutResult, TrajectoryBuffers
from mcore_rl.weights.transports.files.run_files import RunFiles, run_files

G = TypeVar("G")


@contextlib.contextmanager
def assemble(
    config: Config, prepared: Prepared, logs: Path, show: Callable[[str], None], board: Board | None = None
) -> Iterator[Run | SupervisedRun]:
    """Start all processes of the configured run and yield the run; the processes end with the block. `logs`: folder for
    their output. `show` prints start-up lines. `board` receives the work in progress."""
    ranks, roles = rank_map(prepared.layout), roles_of(config, prepared)
    predicts = not trains_scores(config)
    checking = model_check(config.model, config.actor, prepared.layout.dp, prepared.cost, predicts_tokens=predicts)
    recorder = SpanRecorder("driver")
    if board is not None:
        recorder.annotate = board.stage
    stages = Stages(recorder.span, board=board)
    starting = launch(config, ranks, prepared.data.prompts, roles, stages, logs=logs, show=show)
    # groups_removed is entered first, so it removes the control groups after all processes have ended.
    # Files of weights are removed after all processes that use them have ended, too.
    with groups_removed(), weight_files(config) as files, checking as check, starting as processes:
        # Before the first step: a field of config.json that is read wrongly would make the whole run useless.
        check(processes.trainers)
        site = _Site(config, prepared, processes, recorder, stages, Path(config.run.dir), logs, show, files)
        run = site.reinforcement() if prepared.data.prompts else site.supervised()
        failed = True
        try:
            yield run
            failed = False
        finally:
            run.journal.close(failed=failed)


def weight_files(config: Config) -> contextlib.AbstractContextManager[RunFiles | None]:
    """Return the folder for files of weights during a block; None for another transport."""
    directory = config.weights.directory
    return contextlib.nullcontext() if directory is None else run_files(directory, Path(config.run.dir))


@contextlib.contextmanager
def assemble_rollout(
    config: Config, prepared: Prepared, logs: Path, show: Callable[[str], None]
) -> Iterator[RolloutCollector]:
    """Start the engines and graders of the run, without trainer ranks, and yield a collector that generates one batch
    per step with the weights of model.hf_path; the processes end with the block. `logs`: folder for their output.
    `show` prints start-up lines and the first grading failure."""
    roles = roles_of(replace(config, teacher=TeacherConfig()), replace(prepared, critic=None))
    starting = launch_engines(config, prepared.data.prompts, roles, Stages(), logs=logs, show=show)
    with groups_removed(), starting as processes:
        scheduler = Scheduler(processes.engines, concurrent_episodes(config.rollout), steals=_steals(config.reward))
        source = _source(config, prepared, GradingFailures(config.reward, show))
        # Groups without signal stay in the batch, so that all prompts of the step are shown.
        source.keeps_all = True
        yield RolloutCollector(_scored_pool(config, scheduler, processes.groups), source)


@contextlib.contextmanager
def assemble_update(
    config: Config, models: PreparedModels, logs: Path, show: Callable[[str], None]
) -> Iterator[tuple[Repetition, Callable[[TrajectoryBuffers], BuffersRef]]]:
    """Start the trainer and critic ranks of the run, and yield what repeats an update, with a function that wraps
    trajectories for it; the processes end with the block. The other arguments are as in `assemble`."""
    roles = [*critic_roles(models), *teacher_roles(config, models)]
    with launch(config, rank_map(models.layout), {}, roles, Stages(), logs=logs, show=show) as processes:
        recorded: dict[str, Metric] = {}
        reference, entropy, controllers = build_controllers(config, models.estimator, recorded.update)
        yield (
            Repetition(
                config=config,
                actor=processes.trainers,
                critic=group_of(processes.groups, CriticGroup),
                reference=reference,
                teacher=teacher_of(processes.groups),
                entropy=entropy,
                batch_of=recorded_batches(config, models.layout.dp, models.cost, models.estimator, recorded.update),
                estimates_tokens=not models.estimator.per_response,
                controllers=controllers,
                recorded=recorded,
            ),
            processes.trainers.store,
        )


@dataclass(frozen=True)
class _Site:
    """Builder of the parts of a run."""

    config: Config
    prepared: Prepared
    processes: RunProcesses
    recorder: SpanRecorder
    stages: Stages
    directory: Path
    logs: Path
    show: Callable[[str], None]
    files: RunFiles | None

    def reinforcement(self) -> Run:
        """Build a run that samples responses and trains on their rewards."""
        config, engines = self.config, self.processes.engines
        assert engines is not None
        journal = self._journal(signs_for(config))
        if takes_turns(config):
            phases = DevicePhases(self.processes.trainers, engines, record=journal.record, span=self.recorder.span)
            if config.cluster.uses_cuda:
                phases.at_point = self._memory_report(engines, journal).at
            self.stages.phases = phases
        slices = SlicePublisher.connect(self.processes.trainers, engines, config, journal.record, self.files)
        # The fleet starts before the journal exists, so it receives the function later.
        engines.note = journal.note
        scheduler = self._scheduler(engines, slices)
        pool = _scored_pool(config, scheduler, self.processes.groups)
        failures = GradingFailures(config.reward, journal.note)
        source = _source(config, self.prepared, failures)
        publisher: Publisher = slices
        collector: RolloutCollector | StreamingCollector
        in_flight: StreamingCollector | None = None
        if config.rollout.max_staleness:
            collector = in_flight = self._streaming(scheduler, source, pool.scored if pool.scorers else None)
            publisher = SwappingPublisher(slices, collector)
        else:
            collector = RolloutCollector(pool, source, self.prepared.estimator.needs.baseline_rewards)
        reference, entropy, controllers = build_controllers(
            config, self.prepared.estimator, journal.record, self.prepared.sources
        )
        return Run(
            config=config,
            actor=self.processes.trainers,
            collector=StagedCollector(collector, self.stages),
            publisher=publisher,
            validator=self._validator(pool, failures),
            validation_parts=self.prepared.data.validation_parts,
            journal=journal,
            checkpoints=self._checkpoints(),
            remove_unfinished=functools.partial(remove_unjoined, self.directory / "rollouts"),
            stops=STOPS,
            # State that checkpoints contain, so that a resumed run continues where it stopped.
            positions={"collector": in_flight or source, "sampler": self.prepared.sampler, **controllers},
            in_flight=in_flight,
            batch_of=self._batch_of(journal),
            describe=self._describe,
            estimates_tokens=not self.prepared.estimator.per_response,
            critic=self._group(CriticGroup),
            reference=reference,
            teacher=teacher_of(self.processes.groups),
            entropy=entropy,
            logp_gap=self._logp_gap(scheduler),
            profiler=self._profiler(journal),
        )

    def _memory_report(self, engines: Fleet, journal: RunJournal) -> MemoryReport:
        def planned(gpu_bytes: int) -> dict[str, int]:
            # The planner builds the model on the meta device: a few seconds that only this report needs.
            from mcore_rl.planner.memory_points import planned_points
            from mcore_rl.planner.plan import make_plan

            cluster = replace(self.config.cluster, gpu_memory_gib=gpu_bytes / GIB)
            plan = make_plan(replace(self.config, cluster=cluster))
            return planned_points([rank.phases for rank in plan.ranks], plan.times.engine)

        measures = self.processes.trainers.device_memory, engines.device_memory
        return MemoryReport(*measures, planned, record=journal.record, note=journal.note)

    def _logp_gap(self, scheduler: Scheduler) -> LogpGapCheck:
        prepared, config = self.prepared, self.config
        prompt_tokens = np.diff(prepared.data.prompts["train"].offsets)

        def probe(num_prompts: int) -> dict[str, RolloutResult]:
            return scheduler.probe(probe_task(prompt_tokens, config.rollout, config.run.seed, num_prompts))

        return LogpGapCheck(config, self.processes.trainers, probe, prepared.layout.dp, self.show, prepared.cost)

    def _scheduler(self, fleet: Fleet, publisher: SlicePublisher) -> Scheduler:
        config = self.config
        return Scheduler(
            fleet,
            concurrent_episodes(config.rollout),
            streaming=config.rollout.max_staleness > 0,
            steals=_steals(config.reward),
            supply=publisher.supply,
            stages=self.stages,
        )

    def _group(self, kind: type[G]) -> G | None:
        return group_of(self.processes.groups, kind)

    def _describe(self, groups: Groups) -> dict[str, Metric]:
        """Compute the metrics of the step's responses, the engines and the judge."""
        parts = self.processes.engines, self._group(JudgeGroup)
        measured = [part.take_metrics() for part in parts if part is not None]
        overlong = self.config.reward.punishes_overlong
        unpunished = self.config.rollout.max_response_tokens - self.config.reward.overlong.buffer_tokens
        found = describe(groups, unpunished if overlong else None, self.config.algorithm.baseline)
        return found | {name: metric for metrics in measured for name, metric in metrics.items()}

    def supervised(self) -> SupervisedRun:
        """Build a run that trains on texts of the data set; it has no engines."""
        journal = self._journal(signs=())
        return SupervisedRun(
            config=self.config,
            actor=self.processes.trainers,
            objective=text_objective(self.config, self.prepared, self.processes.trainers.store),
            journal=journal,
            profiler=self._profiler(journal),
            checkpoints=self._checkpoints(),
            remove_unfinished=functools.partial(remove_unjoined, self.directory / "rollouts"),
            positions={"sampler": self.prepared.sampler},
            stops=STOPS,
        )

    def _profiler(self, journal: RunJournal) -> StepProfiler | None:
        settings, trainers = self.config.observe.profile, self.processes.trainers
        if not settings.steps:
            return None
        return StepProfiler(
            trainers.processes, trainers.watch, self.directory, settings.steps, settings.ranks, journal.note
        )

    def _checkpoints(self) -> Checkpoints:
        settings, directory = self.config.checkpoint, self.directory / "checkpoints"
        copier = None if settings.copy_to is None else CheckpointCopies(settings.copy_to, directory, self.logs)
        return Checkpoints(directory, settings.keep_last, settings.keep_best, self.recorder.span, copier)

    def _journal(self, signs: Sequence[Sign]) -> RunJournal:
        """Create the journal. With `signs` empty (supervised runs), only the gradient norm is monitored for signs of
        collapse."""
        trainers, engines, groups = self.processes.trainers, self.processes.engines, self.processes.groups
        sources = [group.spans for group in (trainers, *groups.values(), engines) if group is not None]
        observe, steps = self.config.observe, self.config.trainer.steps
        report = ReportProcess(self.directory, self.logs, observe.report_every_steps)
        return RunJournal(self.directory, steps, self.recorder.drain, sources, signs, report, observe)

    def _batch_of(self, journal: RunJournal) -> BatchBuilder:
        prepared = self.prepared
        build = recorded_batches(
            self.config, prepared.layout.dp, prepared.cost, prepared.estimator, journal.record, prepared.sources
        )
        if (writer := ResponseWriter.from_config(self.config)) is None:
            return build

        def batch_of(groups: Groups, step: int, version: int) -> Batch:
            batch = build(groups, step, version)
            # Before ranks receive the batch: they write into the same folder.
            writer.begin(groups, step, version)
            return batch

        return batch_of

    def _streaming(self, scheduler: Scheduler, source: GroupSource, score: ScoreTasks | None) -> StreamingCollector:
        config, earlier = self.config, self.config.rollout.replay_schedule
        replay = None if earlier is None else read_replay(Path(earlier), config.rollout.samples_per_prompt)
        return StreamingCollector(
            scheduler, source, config.trainer.steps, score, replay, config.checkpoint.drain, self.stages.board
        )

    def _validator(self, pool: RolloutPool, failures: GradingFailures) -> Validator | None:
        prompts, config, records = self.prepared.data.prompts, self.config, self.directory / "rollouts"
        if "val" not in prompts:
            return None
        validator = RolloutValidator(pool, len(prompts["val"]), config.rollout, config.run.seed, records, failures)
        return StagedValidator(validator, self.stages)


def _scored_pool(config: Config, scheduler: Scheduler, groups: Mapping[str, RoleGroup]) -> ScoredPool:
    """Return the pool that generates, grades and scores tasks. Scorers have their names in metrics and records."""
    scorers = {}
    if (model := group_of(groups, RewardModelGroup)) is not None:
        scorers["model"] = WeightedScorer(model, config.reward_model.weight)
    if (judge := group_of(groups, JudgeGroup)) is not None:
        scorers["judge"] = WeightedScorer(judge, config.judge.weight)
    has_rules = config.reward.function != NO_RULE
    return ScoredPool(scheduler, scorers, has_rules, grades_step=config.reward.batch == STEP)


def _steals(reward: RewardConfig) -> bool:
    """Return whether idle engines may take requests: batch graders need all responses of a task on one engine."""
    return reward.manager != "batch"


def _source(config: Config, prepared: Prepared, failures: GradingFailures) -> GroupSource:
    return GroupSource(
        sampler=prepared.sampler,
        rollout=config.rollout,
        algorithm=config.algorithm,
        has_signal=groups_with_variance,
        prompts_per_step=config.trainer.prompts_per_step,
        seed=config.run.seed,
        records_dir=Path(config.run.dir) / "rollouts",
        failures=failures,
    )
