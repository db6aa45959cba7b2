"""Spans and phases of calls to the parts of a run: each call is timed and, if trainer ranks and engines share devices,
enters the phase that it needs. Methods of this package use the decorator `staged`.

    phase            memory of trainer ranks        memory of engines
    REPLACE, KEEP    state that the call needs      none: weights are discarded (REPLACE) or in host memory (KEEP)
    SYNC             parameters                     weights
    GENERATE         state that is not offloaded    weights and KV cache

    generate -> engines sleep -> recompute_logp, update -> offload gradients and optimizer -> wake up weights -> sync
             -> offload parameters -> wake up KV cache -> generate

Trainer ranks load the state that a call needs when they receive it (megatron.optim.offload). This module frees the
memory before. Models beside the policy (critic, reward model, judge, teacher) compute on GPUs of trainer ranks in every
placement: before they do, trainer ranks return the memory that torch's allocator keeps from their last pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar

from mcore_rl.config.rules.device_sharing import shares_device
from mcore_rl.config.schema import Config
from mcore_rl.ports import Collector, Validator, WorkBoard
from mcore_rl.types import Groups, Metric, RolloutScalars, Total

if TYPE_CHECKING:
    from mcore_rl.runtime.engines.fleet import Fleet
    from mcore_rl.runtime.roles.trainer import TrainerGroup

P = ParamSpec("P")
T = TypeVar("T")
Owner = TypeVar("Owner", bound="HasStages")
StagedMethod: TypeAlias = Callable[Concatenate[Owner, P], T]

ALL_STATE = ("params", "grads", "optimizer")
NOT_SYNCED = ("grads", "optimizer")


class Phase(Enum):
    """User of the device. Trainer ranks compute in REPLACE and KEEP. A sync follows REPLACE, so engines may discard
    their weights; after KEEP they continue with the same weights."""

    REPLACE = "replace"
    KEEP = "keep"
    SYNC = "sync"
    GENERATE = "generate"


def takes_turns(config: Config) -> bool:
    """Return whether the run needs DevicePhases."""
    return shares_device(config.cluster, config.actor.offload, cuda=config.cluster.uses_cuda)


@dataclass
class DevicePhases:
    """State of the device's memory, and the changes at the beginning of a phase.

    At the start of a run, engines sleep without weights (see `launch`). `record` receives metrics of the changes,
    `span` times them. `at_point` is called at the points of observe.memory_report.POINTS.
    """

    trainers: TrainerGroup
    engines: Fleet
    record: Callable[[dict[str, Metric]], None]
    span: Callable[[str], AbstractContextManager[None]]
    at_point: Callable[[str], None] = lambda point: None
    _has_weights: bool = field(default=False, init=False)
    """True if engines have weights, in device or host memory; False if they were discarded until the next sync."""
    _phase: Phase | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.engines.make_room = self.make_room

    def enter(self, phase: Phase) -> None:
        """Free and restore memory for `phase`."""
        if phase is self._phase:
            return
        if self._phase is Phase.SYNC:
            self.at_point("updated")
        # None until the memory is moved: after an error, entering the phase again must not leave out what failed.
        self._phase = None
        if phase in (Phase.REPLACE, Phase.KEEP):
            self._put_to_sleep(keep_weights=phase is Phase.KEEP)
            # Before REPLACE engines may still have them in host memory, but the sync replaces them.
            self._has_weights &= phase is Phase.KEEP
        elif phase is Phase.SYNC:
            # The trainer's parameters need the memory of the KV cache. The weights return before the sync, which writes
            # into them.
            if "kv_cache" in self.engines.awake:
                self._put_to_sleep(keep_weights=True)
            self._offload(NOT_SYNCED)
            self._wake("weights")
            self._has_weights = True
            self.at_point("weights_awake")
        else:
            # Discarded weights have undefined values until a sync.
            assert self._has_weights, "engines would generate without weights"
            away = self._offload(ALL_STATE)
            self.record({"memory/offloaded_bytes": Total(away)})
            self._wake("weights")
            self._wake("kv_cache")
            self.at_point("kv_cache_awake")
        self._phase = phase

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Return to the present phase after the block."""
        before = self._phase
        yield
        if before is not None:
            self.enter(before)

    def make_room(self) -> None:
        """Offload all trainer state, for an engine that starts. The next phase waits for the engine."""
        if self._phase is not Phase.GENERATE:  # then it is offloaded already
            self._phase = None
            self._offload(ALL_STATE)

    def _put_to_sleep(self, *, keep_weights: bool) -> None:
        if not self.engines.awake:
            self.engines.settle()
            return
        with self.span("engine_sleep"):
            released = self.engines.sleep(keep_weights)
        self.record({"memory/engine_released_bytes": Total(released)})
        self.at_point("asleep")

    def _wake(self, part: str) -> None:
        if part not in self.engines.awake:
            with self.span("engine_wake_up"):
                self.engines.wake_up(part)

    def _offload(self, parts: tuple[str, ...]) -> int:
        with self.span("offload"):
            return self.trainers.offload(parts)


@dataclass
class Stages:
    """Timing and phases of calls. `span` times a block. `phases` is None unless engines and trainer ranks share
    devices; it is set after their processes have been created. `free_cache` returns memory that trainer ranks do not
    use to their GPUs; None without models that share these GPUs. `board` shows counted work; None: nothing is counted.
    """

    span: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext()
    phases: DevicePhases | None = None
    free_cache: Callable[[], None] | None = None
    board: WorkBoard | None = None

    @contextmanager
    def stage(self, name: str | None = None, phase: Phase | None = None, *, guest: bool = False) -> Iterator[None]:
        """Run the block in `phase`; the span `name` includes entering the phase. `guest`: another model computes on the
        GPUs of trainer ranks."""
        with self.span(name) if name is not None else nullcontext():
            if self.phases is not None and phase is not None:
                self.phases.enter(phase)
            # Also in the same phase: trainer ranks may have computed in it.
            if guest and self.free_cache is not None:
                self.free_cache()
            yield


class HasStages(Protocol):
    """Owner of methods that are `staged`."""

    @property
    def stages(self) -> Stages: ...


def staged(
    name: str | None, phase: Phase | None, *, guest: bool = False
) -> Callable[[StagedMethod[Owner, P, T]], StagedMethod[Owner, P, T]]:
    """Decorate a method: it runs in `phase` and is recorded as the span `name`, as in Stages.stage."""

    def decorate(method: StagedMethod[Owner, P, T]) -> StagedMethod[Owner, P, T]:
        @functools.wraps(method)
        def call(self: Owner, *arguments: P.args, **options: P.kwargs) -> T:
            with self.stages.stage(name, phase, guest=guest):
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
