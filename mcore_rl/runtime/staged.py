"""Spans and phases of calls to the parts of a run: each call is timed and, if engines and trainer ranks share devices,
enters the phase that it needs. Classes of this package use the decorator `staged`; the collector and the validator have
wrappers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar

from mcore_rl.ports import Collector, Validator
from mcore_rl.runtime.phases import DevicePhases, Phase
from mcore_rl.types import Groups, RolloutScalars

P = ParamSpec("P")
T = TypeVar("T")
Owner = TypeVar("Owner", bound="HasStages")
StagedMethod: TypeAlias = Callable[Concatenate[Owner, P], T]


@dataclass
class Stages:
    """Timing and phases of calls. `span` times a block. `phases` is set when engines and trainer ranks exist; without
    it, they always keep their memory."""

    span: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext()
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


def staged(name: str | None, phase: Phase | None) -> Callable[[StagedMethod[Owner, P, T]], StagedMethod[Owner, P, T]]:
    """Decorate a method: it runs in `phase` and is recorded as the span `name`, as in Stages.stage."""

    def decorate(method: StagedMethod[Owner, P, T]) -> StagedMethod[Owner, P, T]:
        @functools.wraps(method)
        def call(self: Owner, *arguments: P.args, **options: P.kwargs) -> T:
            with self.stages.stage(name, phase):
                return method(self, *arguments, **options)

        return call

    return decorate


@dataclass(frozen=True)
class StagedCollector:
    """Collector with spans."""

    collector: Collector
    stages: Stages

    def collect(self, step: int) -> Groups:
        with self.stages.span("rollout"):
            return self.collector.collect(step)


@dataclass(frozen=True)
class StagedValidator:
    """Validator with spans."""

    validator: Validator
    stages: Stages

    def validate(self, step: int) -> RolloutScalars:
        with self.stages.span("validate"):
            return self.validator.validate(step)
