"""Wrappers of the parts of a run, one per Protocol. They record a span for each call and, if engines and trainer ranks
share devices, enter the phase that the call needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np

from mcore_rl.ports import (
    Actor,
    Collector,
    Critic,
    EngineProbe,
    PendingSave,
    Publisher,
    ResponseScorer,
    Validator,
)
from mcore_rl.rollout.scored_pool import DeferredGradingPool
from mcore_rl.runtime.phases import DevicePhases, Phase
from mcore_rl.types import (
    Batch,
    BatchHandle,
    Grades,
    Groups,
    LogpGap,
    Metric,
    RolloutResult,
    RolloutScalars,
    RolloutTask,
    SavedFile,
    TokenRefs,
)


@dataclass(frozen=True)
class Stages:
    """Timing and phases of calls. `span` times a block. Without `phases`, engines and trainer ranks always keep their
    memory."""

    span: Callable[[str], AbstractContextManager[None]]
    phases: DevicePhases | None = None

    @contextmanager
    def stage(self, name: str | None = None, phase: Phase | None = None) -> Iterator[None]:
        """Run the block in `phase`; the span `name` includes entering the phase."""
        with self.span(name) if name is not None else nullcontext():
            if self.phases is not None and phase is not None:
                self.phases.enter(phase)
            yield


@dataclass(frozen=True)
class StagedActor:
    """Actor with spans and phases."""

    actor: Actor
    stages: Stages

    def recompute_logp(self, batch: Batch) -> BatchHandle:
        with self.stages.stage("logp", Phase.REPLACE):
            return self.actor.recompute_logp(batch)

    def compare_logp(self, batch: Batch) -> list[LogpGap]:
        with self.stages.stage("compare_logp", Phase.KEEP):  # no sync follows: engines keep their weights
            return self.actor.compare_logp(batch)

    def reference_logp(self, handle: BatchHandle) -> BatchHandle:
        with self.stages.stage("reference", Phase.REPLACE):
            return self.actor.reference_logp(handle)

    def kl_penalties(self, handle: BatchHandle, coefficient: float) -> tuple[BatchHandle, np.ndarray]:
        with self.stages.stage("reference", Phase.REPLACE):
            return self.actor.kl_penalties(handle, coefficient)

    def with_advantages(self, handle: BatchHandle, advantages: np.ndarray) -> BatchHandle:
        return self.actor.with_advantages(handle, advantages)

    def refresh_reference(self) -> None:
        with self.stages.stage("reference", Phase.REPLACE):
            self.actor.refresh_reference()

    def estimate(self, handle: BatchHandle, values: TokenRefs | None) -> tuple[BatchHandle, TokenRefs]:
        with self.stages.stage("advantages", Phase.REPLACE):
            return self.actor.estimate(handle, values)

    def update(self, handle: BatchHandle) -> dict[str, Metric]:
        with self.stages.stage("update", Phase.REPLACE):
            return self.actor.update(handle)

    def start_save(self, directory: str, *, snapshot: bool) -> PendingSave:
        with self.stages.stage(phase=Phase.KEEP):
            return self.actor.start_save(directory, snapshot=snapshot)

    def load(self, directory: str, files: Sequence[SavedFile]) -> None:
        with self.stages.stage("load", Phase.KEEP):
            self.actor.load(directory, files)

    def export_hf(self, directory: str, source: str) -> None:
        with self.stages.stage(phase=Phase.KEEP):
            self.actor.export_hf(directory, source)

    def export_adapter(self, directory: str, source: str) -> None:
        with self.stages.stage(phase=Phase.KEEP):
            self.actor.export_adapter(directory, source)


@dataclass(frozen=True)
class StagedCritic:
    """Critic with spans and phases."""

    critic: Critic
    stages: Stages

    def values(self, batch: Batch) -> TokenRefs:
        with self.stages.stage("values", Phase.REPLACE):
            return self.critic.values(batch)

    def update(self, values: TokenRefs, returns: TokenRefs) -> dict[str, Metric]:
        with self.stages.stage("critic_update", Phase.REPLACE):
            return self.critic.update(values, returns)

    def start_save(self, directory: str, *, snapshot: bool) -> PendingSave:
        with self.stages.stage(phase=Phase.KEEP):
            return self.critic.start_save(directory, snapshot=snapshot)

    def load(self, directory: str, files: Sequence[SavedFile]) -> None:
        with self.stages.stage(phase=Phase.KEEP):
            self.critic.load(directory, files)


@dataclass(frozen=True)
class StagedPublisher:
    """Publisher with spans and phases."""

    publisher: Publisher
    stages: Stages

    def publish(self, version: int) -> int:
        with self.stages.stage("weight_sync", Phase.SYNC):
            return self.publisher.publish(version)

    def verify(self) -> int:
        with self.stages.stage("verify", Phase.SYNC):
            return self.publisher.verify()


@dataclass(frozen=True)
class StagedPool:
    """DeferredGradingPool with spans and phases."""

    pool: DeferredGradingPool
    stages: Stages

    @property
    def num_engines(self) -> int:
        return self.pool.num_engines

    def run(self, tasks: Sequence[RolloutTask]) -> list[RolloutResult]:
        with self.stages.stage(phase=Phase.GENERATE):
            return self.pool.run(tasks)

    def grade(self, tasks: Sequence[RolloutTask], results: Sequence[RolloutResult]) -> list[Grades]:
        with self.stages.stage("grade"):
            return self.pool.grade(tasks, results)

    def amend(self, tasks: Sequence[RolloutTask], results: Sequence[RolloutResult]) -> None:
        self.pool.amend(tasks, results)


@dataclass(frozen=True)
class StagedScorer:
    """ResponseScorer with the span `name`, and phases."""

    scorer: ResponseScorer
    stages: Stages
    name: str

    def score(self, tasks: Sequence[RolloutTask], results: Sequence[RolloutResult]) -> list[np.ndarray]:
        # Dynamic sampling may generate another batch with the same weights afterwards.
        with self.stages.stage(self.name, Phase.KEEP):
            return self.scorer.score(tasks, results)


@dataclass(frozen=True)
class StagedCollector:
    """Collector with spans and phases."""

    collector: Collector
    stages: Stages

    def collect(self, step: int) -> Groups:
        with self.stages.stage("rollout"):
            return self.collector.collect(step)


@dataclass(frozen=True)
class StagedProbe:
    """EngineProbe with spans and phases."""

    engines: EngineProbe
    stages: Stages

    def probe(self, num_prompts: int) -> dict[str, RolloutResult]:
        with self.stages.stage("probe", Phase.GENERATE):
            return self.engines.probe(num_prompts)


@dataclass(frozen=True)
class StagedValidator:
    """Validator with spans and phases."""

    validator: Validator
    stages: Stages

    def validate(self, step: int) -> RolloutScalars:
        with self.stages.stage("validate"):
            return self.validator.validate(step)
