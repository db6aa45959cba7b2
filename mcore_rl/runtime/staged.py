"""Spans and phases of calls to the parts of a run: each call is timed and, if engines and trainer ranks share devices,
enters the phase that it needs. Groups of ranks use the decorator `staged`, other parts have a wrapper per Protocol."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar

from mcore_rl.ports import Collector, EngineProbe, Publisher, Validator
from mcore_rl.rollout.scored_pool import DeferredGradingPool
from mcore_rl.runtime.phases import DevicePhases, Phase
from mcore_rl.types import Grades, Groups, RolloutResult, RolloutScalars, RolloutTask

P = ParamSpec("P")
T = TypeVar("T")
Owner = TypeVar("Owner", bound="HasStages")
StagedMethod: TypeAlias = Callable[Concatenate[Owner, P], T]


@dataclass
class Stages:
    """Timing and phases of calls. `span` times a block. `phases` is set when engines and trainer ranks exist; without
    it, they always keep their memory."""

    span: Callable[[str], AbstractContextManager[None]]
    phases: DevicePhases | None = None

    @contextmanager
    def stage(self, name: str | None = None, phase: Phase | None = None) -> Iterator[None]:
        """Run the block in `phase`; the span `name` includes entering the phase."""
        with self.span(name) if name is not None else nullcontext():
            if self.phases is not None and phase is not None:
                self.phases.enter(phase)
            yield


class HasStages(Protocol):
    """Owner of methods that are `staged`."""

    @property
    def stages(self) -> Stages: ...


def staged(name: str | None, phase: Phase) -> Callable[[StagedMethod[Owner, P, T]], StagedMethod[Owner, P, T]]:
    """Decorate a method that runs in `phase` and is recorded as the span `name`."""

    def decorate(method: StagedMethod[Owner, P, T]) -> StagedMethod[Owner, P, T]:
        @functools.wraps(method)
        def call(self: Owner, *arguments: P.args, **options: P.kwargs) -> T:
            with self.stages.stage(name, phase):
                return method(self, *arguments, **options)

        return call

    return decorate


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
        # No span of its own: the call is a part of `rollout` or `validate`.
        with self.stages.stage(phase=Phase.GENERATE):
            return self.pool.run(tasks)

    def grade(self, tasks: Sequence[RolloutTask], results: Sequence[RolloutResult]) -> list[Grades]:
        with self.stages.stage("grade"):
            return self.pool.grade(tasks, results)

    def amend(self, tasks: Sequence[RolloutTask], results: Sequence[RolloutResult]) -> None:
        self.pool.amend(tasks, results)


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
