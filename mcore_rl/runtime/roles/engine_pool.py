"""The rollout engines as the driver knows them: it routes tasks to them, and replaces those that are lost."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import numpy as np

from mcore_rl.errors import ClusterDiedError, McoreRLError, WorkerDiedError
from mcore_rl.rewards.together import TaskToGrade
from mcore_rl.rollout.router import Work
from mcore_rl.runtime.health import Watch
from mcore_rl.runtime.roles.base import drain_spans
from mcore_rl.runtime.roles.delivery import Chunk, Delivery, Forgotten, Part, Rows
from mcore_rl.runtime.roles.engine_stream import EngineStream
from mcore_rl.runtime.roles.pool_run import PoolRun
from mcore_rl.runtime.roles.pooled_engine import PooledEngine
from mcore_rl.runtime.stops import STOPS
from mcore_rl.types import (
    BuffersRef,
    Grades,
    Metric,
    RolloutResult,
    RolloutScalars,
    RolloutTask,
    Span,
    Total,
    merge_metrics,
)
from mcore_rl.weights.transports.topology import Endpoint

T = TypeVar("T")


def _nobody_supplies() -> None:
    raise McoreRLError("engines were lost before any had weights")


@dataclass
class EnginePool:
    """All rollout engines; a GradingPool. `room`: requests that one of them is given at most.

    One that dies, or hangs, starts again beside what the others do, and gets its weights with the first update after
    that; where none is left, `supply` brings the present ones. What only the lost one had goes on from its journal, and
    where that says nothing anew: the same, since a response is a function of its prompt, its seed and the weights.
    """

    engines: list[PooledEngine]
    watch: Watch
    room: int
    max_restarts: int = 0
    steals: bool = True
    """Whether an engine that has nothing left to begin takes requests of others."""
    supply: Callable[[], None] = _nobody_supplies
    interrupted: Callable[[], AbstractContextManager[None]] | None = None
    """Phases.interrupted, where engines and trainer ranks take turns on their devices."""
    note: Callable[[str], None] = print
    version: int = field(default=0, init=False)
    """Of weights: every engine that serves has these, or later ones."""
    num_restarts: int = field(default=0, init=False)
    forgotten: Forgotten = field(default_factory=Forgotten)
    stream: EngineStream | None = field(default=None, init=False)
    """Through which all tasks go, where engines have work all the time."""
    _lengths: tuple[int, int] = field(default=(0, 0), init=False)
    """Tokens and number of the responses so far, with their prompts."""
    _asleep: bool = field(default=False, init=False)
    _figures: dict[str, Metric] = field(default_factory=dict, init=False)
    _journals: dict[str, str] = field(default_factory=dict, init=False)
    """Of engines that were lost, by maker."""

    @property
    def num_engines(self) -> int:
        return len(self.engines)

    @property
    def handles(self) -> list[Any]:
        return [engine.handle for engine in self.engines]

    def run(self, tasks: Sequence[RolloutTask]) -> list[RolloutResult]:
        """Every task on an engine that has room, where its trajectories stay as long as anything refers to them.

        Raises: WorkerDiedError when an engine is lost once more than `max_restarts`.
        """
        tasks = [replace(task, version=self.version) for task in tasks]
        if self.stream is not None:
            return self.stream.run(tasks)
        run = PoolRun(self, tasks)
        results = run.results()
        if all(task.prompt_set == "train" for task in tasks):
            self._figures = merge_metrics([self._figures, {"engine/idle_fraction": run.idle_fraction()}])
        return results

    def probe(self, task: RolloutTask) -> dict[str, RolloutResult]:
        """As ProbedPool.probe, on the engines that have weights. No metric of a step counts it."""

        def call() -> dict[str, RolloutResult]:
            self.lose_dead()
            engines = [engine for engine in self.engines if engine.serves]
            shift = len(task.group_ids)
            tasks = [
                replace(task, version=self.version, group_ids=task.group_ids + number * shift)
                for number in range(len(engines))
            ]
            made = self.watch.get([engine.handle.probe.remote(own) for engine, own in zip(engines, tasks, strict=True)])
            return {
                engine.start.name: self._probed(engine, own, *found)
                for engine, own, found in zip(engines, tasks, made, strict=True)
            }

        return self.insist(call)

    def _probed(
        self, engine: PooledEngine, task: RolloutTask, key: int, scalars: RolloutScalars, busy_seconds: float
    ) -> RolloutResult:
        engine.busy_seconds = busy_seconds
        place = self.forgotten.refer(engine.maker, engine.handle, key)
        part = Part(place, 0, len(scalars.group_ids), task.span, scalars.digests)
        return BuffersRef(Chunk([part], task, self.renew)), scalars

    def amend(self, tasks: Sequence[RolloutTask], results: Sequence[RolloutResult]) -> None:
        """Puts rewards, accuracies and scores into the records of tasks that `run` has run, on any engine."""
        changed = [(task.records, scalars) for task, (_, scalars) in zip(tasks, results, strict=True) if task.records]

        def amend() -> None:
            handles = itertools.cycle(self._up_now())
            self.watch.get(
                [
                    handle.amend_records.remote(records, scalars.rewards, scalars.accuracies, dict(scalars.scores))
                    for handle, (records, scalars) in zip(handles, changed, strict=False)
                ]
            )

        self.insist(amend)

    def grade(self, tasks: Sequence[RolloutTask], results: Sequence[RolloutResult]) -> list[Grades]:
        """By the graders of one engine, which fetches what others wrote."""
        given = [
            TaskToGrade(task.prompt_set, scalars.prompt_rows, task.records)
            for task, (_, scalars) in zip(tasks, results, strict=True)
        ]
        rows = Rows.of([np.arange(len(task.prompt_rows)) for task in given])

        def grade() -> list[Grades]:
            grader = self._up_now()[0]
            [trajectories] = Delivery([grader], self.watch).deliver([chunk for chunk, _ in results], [rows])
            return cast("list[Grades]", self.watch.get([grader.grade.remote(given, *trajectories)])[0])

        return self.insist(grade)

    def _up_now(self) -> list[Any]:
        """Engines that do not start, of which there is at least one."""
        if all(engine.starting is not None for engine in self.engines):
            self.settle()
        return [engine.handle for engine in self.engines if engine.starting is None]

    @property
    def mean_tokens(self) -> float:
        """Of prompts and responses so far; before there are any, all are alike."""
        tokens, responses = self._lengths
        return tokens / responses if responses else 1.0

    def work(self, requests: int) -> Work:
        return Work(requests, requests * self.mean_tokens)

    def count_lengths(self, tokens: int, responses: int) -> None:
        self._lengths = self._lengths[0] + tokens, self._lengths[1] + responses

    def take_figures(self) -> dict[str, Metric]:
        """Since the last call: how much of the time engines had nothing to do while others generated for training, how
        many were started again, how many tokens of lost ones others have gone on from, and how many requests others
        have taken from those that had not begun them."""
        figures, self._figures = self._figures, {}
        none = dict.fromkeys(("engine/restarts", "engine/tokens_taken_over", "engine/requests_stolen"), Total(0))
        return {**none, **figures}

    def count(self, name: str, number: int) -> None:
        self._figures = merge_metrics([self._figures, {name: Total(number)}])

    def taken_over(self, task: RolloutTask, maker: str) -> RolloutTask:
        """The task with the journal of the lost engine of that name."""
        journal = self._journals.get(maker)
        return task if journal is None else replace(task, journals=(*task.journals, journal))

    def lose(self, engine: PooledEngine, why: str) -> None:
        """Starts it again; it has no weights then.

        Raises: WorkerDiedError when that was done often enough; KeyboardInterrupt where a signal to stop has come,
        which may have gone to all processes.
        """
        STOPS.end()
        if self.num_restarts == self.max_restarts:
            raise WorkerDiedError(f"{why} (rollout.max_engine_restarts={self.max_restarts})")
        self.num_restarts += 1
        self.count("engine/restarts", 1)
        first_line = why.splitlines()[0]
        self.note(f"warning: {first_line}; it starts again ({self.num_restarts} of {self.max_restarts} times)")
        if engine.start.journal is not None:
            self._journals[engine.maker] = engine.start.journal
        engine.incarnation += 1
        engine.busy_seconds, engine.has_weights = 0.0, False
        engine.starting, engine.deadline = engine.start.again(), self.watch.start_deadline()

    def is_lost(self, engine: PooledEngine) -> bool:
        """Whether it is, or will be seen to be soon."""
        if all(self.watch.lost(handle) is None for handle in engine.start.handles):
            self.watch.blame_the_dead(engine.start.handles)  # others may have died as well
        return any(self.watch.lost(handle) is not None for handle in engine.start.handles)

    def lose_dead(self) -> list[PooledEngine]:
        """Those of which some process has died since the last look; they start again."""
        dead = self._dead()
        for engine in dead:
            reasons = [why for handle in engine.start.handles if (why := self.watch.lost(handle)) is not None]
            self.lose(engine, reasons[0])
        return dead

    def _dead(self) -> list[PooledEngine]:
        """Engines of which some process is lost."""
        if not self.watch.any_lost:
            return []
        lost = self.watch.lost
        return [engine for engine in self.engines if any(lost(handle) is not None for handle in engine.start.handles)]

    def settle(self) -> None:
        """Waits until every engine is up."""

        def wait() -> None:
            for engine in self.engines:
                if engine.starting is not None:
                    self.watch.get_started({engine.starting: engine.start.handles})
                    engine.starting = None

        self.lose_dead()
        self.insist(wait)

    def up(self) -> list[int]:
        """The engines that can take weights, by index; those that still start are not waited for, unless all do."""

        def look() -> None:
            for engine in self.engines:
                if engine.starting is not None and self.watch.has_started(
                    engine.starting, engine.start.handles, engine.deadline
                ):
                    engine.starting = None

        self.lose_dead()
        self.insist(look)
        if all(engine.starting is not None for engine in self.engines):
            self.settle()
        return [index for index, engine in enumerate(self.engines) if engine.starting is None]

    def insist(self, call: Callable[[], T]) -> T:
        """The result of `call`, which is made anew as often as an engine is lost in it.

        Raises: what it raises for another reason.
        """
        while True:
            before = self.num_restarts
            try:
                return call()
            except ClusterDiedError:
                raise
            except WorkerDiedError:
                self.watch.blame_the_dead()
                self.lose_dead()
                if self.num_restarts == before:  # `call` may have replaced an engine itself
                    raise

    def lack_weights(self, indices: Sequence[int]) -> bool:
        """Whether any of these engines has none yet."""
        return any(not self.engines[index].has_weights for index in indices)

    def supplied(self, indices: Sequence[int]) -> None:
        """These engines have the present weights."""
        for engine in (self.engines[index] for index in indices):
            if not engine.has_weights:
                self.note(f"{engine.start.name} is up again, with the weights of version {self.version}")
            engine.has_weights = True

    def renew(self, chunks: Sequence[Chunk]) -> bool:
        """Generate the trajectories of those chunks again whose engine is lost with them; return whether there are any.
        Sleeping engines are woken for it, and sleep again afterwards."""
        if not self._asleep:
            return self._renew(chunks)
        if self.interrupted is None or not (self.watch.any_lost or self._lost_parts(chunks)):
            return False
        for engine in self._dead():
            engine.start.kill()  # ranks that fetch from it have to free their devices next
        with self.interrupted():
            self._start_asleep()
            self.supply()
            return self._renew(chunks)

    def _start_asleep(self) -> None:
        """Start lost engines again, and put them to sleep like the others."""
        before = {engine.start.name: engine.incarnation for engine in self.engines}

        def start() -> None:
            self.settle()
            started = [engine for engine in self.engines if engine.incarnation != before[engine.start.name]]
            self.watch.get([engine.handle.sleep.remote(False) for engine in started])

        self.insist(start)

    def _lost_parts(self, chunks: Sequence[Chunk]) -> list[tuple[Chunk, Part]]:
        """Parts that no present engine keeps."""
        makers = {engine.maker for engine in self.engines}
        return [(chunk, part) for chunk in chunks for part in chunk.parts if part.place.maker not in makers]

    def _renew(self, chunks: Sequence[Chunk]) -> bool:
        self.lose_dead()
        lost = self._lost_parts(chunks)
        if not lost:
            return False
        again = [self._made_again(chunk.task, part) for chunk, part in lost]
        results = PoolRun(self, again).results() if self.stream is None else self.stream.run(again)
        for (chunk, part), (ref, _) in zip(lost, results, strict=True):
            made = cast(Chunk, ref).parts
            _require_same(part, made)
            moved = [replace(new, first=part.first + new.first, last=part.first + new.last) for new in made]
            chunk.parts = [each for old in chunk.parts for each in (moved if old is part else [old])]
        return True

    def _made_again(self, task: RolloutTask, part: Part) -> RolloutTask:
        """Its records are written."""
        return self.taken_over(replace(task, records=None, responses=part.responses), part.place.maker)

    def endpoints(self) -> list[Endpoint]:
        """Of all engine ranks, engine by engine."""
        return [endpoint for of_engine in self.call("endpoints") for endpoint in of_engine]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """The results of a method on every engine."""
        return self.watch.get([getattr(handle, method).remote(*arguments) for handle in self.handles])

    def sleep(self, keep_weights: bool) -> int:
        """Frees the memory of every engine; returns the bytes that all of them gave up."""
        self._asleep = True
        return sum(self._call_settled("sleep", keep_weights))

    def wake_up(self, part: str) -> None:
        """Gives "weights" or "kv_cache" back to every engine."""
        self._call_settled("wake_up", part)
        self._asleep = part != "kv_cache"  # which comes last

    def _call_settled(self, method: str, argument: Any) -> list[Any]:
        """One that starts would take memory that others count on: all are up first."""

        def call() -> list[Any]:
            self.settle()
            return self.call(method, argument)

        return self.insist(call)

    def spans(self) -> list[Span]:
        self.lose_dead()
        return self.insist(
            lambda: drain_spans(self.watch, [engine.handle for engine in self.engines if engine.starting is None])
        )


def _require_same(lost: Part, again: Sequence[Part]) -> None:
    """What was made again goes with the rewards of what was lost.

    Raises: WorkerDiedError where tools or users answered otherwise than the first time.
    """
    digests = [part.digests for part in again if part.digests is not None]
    if lost.digests is not None and not np.array_equal(lost.digests, np.concatenate(digests)):
        raise WorkerDiedError(
            f"{lost.place.maker} was lost with responses that ranks had not fetched, and they came out otherwise when "
            "they were made again: tools or environments that answer differently cannot be repeated, nor what began "
            "with earlier weights where its journal is lost too. The run resumes from its last checkpoint"
        )
