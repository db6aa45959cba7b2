"""The rollout engines as the driver knows them: it routes tasks to them, and replaces those that are lost."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from mcore_rl.errors import ClusterDiedError, McoreRLError, WorkerDiedError
from mcore_rl.rollout.router import Router, Work
from mcore_rl.runtime.health import Watch
from mcore_rl.runtime.roles.base import drain_spans
from mcore_rl.runtime.roles.delivery import Chunk, Forgotten, Place
from mcore_rl.runtime.stops import STOPS
from mcore_rl.types import (
    BuffersRef,
    Mean,
    Metric,
    RolloutResult,
    RolloutTask,
    Span,
    Total,
    merge_metrics,
)
from mcore_rl.weights.transports.topology import Endpoint

T = TypeVar("T")
PART_OF_CALLS = 16
"""The driver waits until one in so many of the calls under way has ended: each look at them costs as much as there are
calls."""


class Start(Protocol):
    """An EngineStart."""

    @property
    def name(self) -> str: ...

    @property
    def handles(self) -> list[Any]: ...

    def again(self) -> Any: ...


@dataclass
class PooledEngine:
    """`starting`: the end of its set-up, while it starts again; `has_weights`: those that the others have."""

    start: Start
    incarnation: int = 0
    starting: Any = None
    has_weights: bool = True
    busy_seconds: float = 0.0
    """As it said last."""

    @property
    def handle(self) -> Any:
        return self.start.handles[0]

    @property
    def serves(self) -> bool:
        return self.starting is None and self.has_weights

    @property
    def maker(self) -> str:
        """Of trajectories: a name that no other process has had."""
        return f"{self.start.name} (started {self.incarnation + 1} times)" if self.incarnation else self.start.name


def _nobody_supplies() -> None:
    raise McoreRLError("engines were lost before any had weights")


@dataclass
class EnginePool:
    """All rollout engines; a RecordedPool. `room`: requests that one of them is given at most.

    One that dies, or hangs, starts again beside what the others do, and gets its weights with the next update; where
    none is left, `supply` brings the present ones. What only the lost one had is generated anew: the same, since a
    response is a function of its prompt, its seed and the weights.
    """

    engines: list[PooledEngine]
    watch: Watch
    room: int
    max_restarts: int = 0
    supply: Callable[[], None] = _nobody_supplies
    note: Callable[[str], None] = print
    num_restarts: int = field(default=0, init=False)
    forgotten: Forgotten = field(default_factory=Forgotten)
    _lengths: tuple[int, int] = field(default=(0, 0), init=False)
    """Tokens and number of the responses so far, with their prompts."""
    _asleep: bool = field(default=False, init=False)
    _figures: dict[str, Metric] = field(default_factory=dict, init=False)

    @property
    def num_engines(self) -> int:
        return len(self.engines)

    @property
    def num_without_weights(self) -> int:
        return sum(not engine.has_weights for engine in self.engines)

    @property
    def handles(self) -> list[Any]:
        return [engine.handle for engine in self.engines]

    def run(self, tasks: Sequence[RolloutTask]) -> list[RolloutResult]:
        """Every task on an engine that has room, where its trajectories stay as long as anything refers to them.

        Raises: WorkerDiedError when an engine is lost once more than `max_restarts`.
        """
        run = _PoolRun(self, tasks)
        results = run.results()
        if all(task.prompt_set == "train" for task in tasks):
            self._figures = merge_metrics([self._figures, {"engine/idle_fraction": run.idle_fraction()}])
        return results

    def amend(self, tasks: Sequence[RolloutTask], results: Sequence[RolloutResult]) -> None:
        """Puts rewards, accuracies and scores into the records of tasks that `run` has run, on any engine."""
        changed = [(task.records, scalars) for task, (_, scalars) in zip(tasks, results, strict=True) if task.records]

        def amend() -> None:
            if all(engine.starting is not None for engine in self.engines):
                self.settle()
            handles = itertools.cycle([engine.handle for engine in self.engines if engine.starting is None])
            self.watch.get(
                [
                    handle.amend_records.remote(records, scalars.rewards, scalars.accuracies, dict(scalars.scores))
                    for handle, (records, scalars) in zip(handles, changed, strict=False)
                ]
            )

        self.insist(amend)

    @property
    def mean_tokens(self) -> float:
        """Of prompts and responses so far; before there are any, all are alike."""
        tokens, responses = self._lengths
        return tokens / responses if responses else 1.0

    def work(self, task: RolloutTask) -> Work:
        requests = len(task.prompt_rows) * task.samples_per_prompt
        return Work(requests, requests * self.mean_tokens)

    def count_lengths(self, tokens: int, responses: int) -> None:
        self._lengths = self._lengths[0] + tokens, self._lengths[1] + responses

    def take_figures(self) -> dict[str, Metric]:
        """Since the last call: how much of the time engines had nothing to do while others generated for training, and
        how many were started again."""
        figures, self._figures = self._figures, {}
        return {"engine/restarts": Total(0), **figures}

    def lose(self, engine: PooledEngine, why: str) -> None:
        """Starts it again; it has no weights then.

        Raises: WorkerDiedError when that was done often enough; KeyboardInterrupt where a signal to stop has come,
        which may have gone to all processes.
        """
        STOPS.end()
        if self.num_restarts == self.max_restarts:
            raise WorkerDiedError(f"{why} (rollout.max_engine_restarts={self.max_restarts})")
        self.num_restarts += 1
        self._figures = merge_metrics([self._figures, {"engine/restarts": Total(1)}])
        first_line = why.splitlines()[0]
        self.note(f"warning: {first_line}; it starts again ({self.num_restarts} of {self.max_restarts} times)")
        engine.incarnation += 1
        engine.busy_seconds, engine.has_weights = 0.0, False
        engine.starting = engine.start.again()

    def is_lost(self, engine: PooledEngine) -> bool:
        """Whether it is, or will be seen to be soon."""
        if all(self.watch.lost(handle) is None for handle in engine.start.handles):
            self.watch.blame_the_dead()
        return any(self.watch.lost(handle) is not None for handle in engine.start.handles)

    def lose_dead(self) -> list[PooledEngine]:
        """Those of which some process has died since the last look; they start again."""
        dead = []
        for engine in self.engines if self.watch.any_lost else ():
            reasons = [why for handle in engine.start.handles if (why := self.watch.lost(handle)) is not None]
            if reasons:
                self.lose(engine, reasons[0])
                dead.append(engine)
        return dead

    def settle(self) -> bool:
        """Waits until every engine is up; whether any of them has just started, and has not met the trainer ranks."""

        def wait() -> None:
            for engine in self.engines:
                if engine.starting is not None:
                    self.watch.get_started({engine.starting: engine.start.handles})
                    engine.starting = None

        self.lose_dead()
        self.insist(wait)
        return self.num_without_weights > 0

    def insist(self, call: Callable[[], T]) -> T:
        """The result of `call`, which is made anew as often as an engine is lost in it.

        Raises: what it raises for another reason.
        """
        while True:
            try:
                return call()
            except ClusterDiedError:
                raise
            except WorkerDiedError:
                self.watch.blame_the_dead()
                if not self.lose_dead():
                    raise

    def supplied(self) -> None:
        """All engines have the present weights."""
        for engine in self.engines:
            engine.has_weights = True

    def renew(self, chunks: Sequence[Chunk]) -> bool:
        """Generates the trajectories of those chunks again whose engine is lost with them; whether there are any. Not
        while engines sleep."""
        self.lose_dead()
        makers = {engine.maker for engine in self.engines}
        lost = [chunk for chunk in chunks if chunk.place.maker not in makers]
        if not lost or self._asleep:
            return False
        run = _PoolRun(self, [replace(chunk.task, records=None) for chunk in lost])  # they are written
        run.results()
        for number, chunk in enumerate(lost):
            chunk.place = run.places[number]
        return True

    def endpoints(self) -> list[Endpoint]:
        """Of all engine ranks, engine by engine."""
        return [endpoint for of_engine in self.call("endpoints") for endpoint in of_engine]

    def send(self, method: str, *arguments: Any) -> list[Any]:
        """References of the results of a method on every engine."""
        return [getattr(handle, method).remote(*arguments) for handle in self.handles]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return self.watch.get(self.send(method, *arguments))

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


class _PoolRun:
    """Tasks on their way through the engines. One call of each is under way: it brings tasks, and comes back with what
    has ended when the engine asks for more."""

    def __init__(self, pool: EnginePool, tasks: Sequence[RolloutTask]) -> None:
        pool.lose_dead()
        self._pool, self._tasks = pool, tasks
        self._works = [pool.work(task) for task in tasks]
        self._router = Router(pool.room)
        for number, work in enumerate(self._works):
            self._router.offer(number, work)
        self._engines: set[int] = set()
        """That take part."""
        for index, engine in enumerate(pool.engines):
            if engine.serves:
                self._join(index)
        self._calls: dict[Any, int] = {}
        """Under way, and the engine of each."""
        self._results: dict[int, RolloutResult] = {}
        self._made_by: dict[int, int] = {}
        self.places: dict[int, Place] = {}
        self._began = time.perf_counter()
        self._busy_before = [engine.busy_seconds for engine in pool.engines]

    def results(self) -> list[RolloutResult]:
        """In the order of the tasks."""
        pool = self._pool
        while len(self._results) < len(self._tasks):
            self._start()
            if not self._engines:
                pool.supply()
                for index in range(pool.num_engines):
                    self._join(index)
                continue
            ready, _ = pool.watch.wait(list(self._calls), max(1, len(self._calls) // PART_OF_CALLS))
            for call in ready:
                self._take(call)
            for engine in pool.lose_dead():
                self._take_back(engine)
        return [self._results[number] for number in range(len(self._tasks))]

    def idle_fraction(self) -> Mean:
        """Of the time of all engines since the run began, what they had nothing to do in."""
        seconds = (time.perf_counter() - self._began) * self._pool.num_engines
        busy = sum(e.busy_seconds - before for e, before in zip(self._pool.engines, self._busy_before, strict=True))
        return Mean(max(0.0, seconds - max(0.0, busy)), seconds)

    def _join(self, index: int) -> None:
        self._engines.add(index)
        self._router.ask(index, Work(0, 0.0))

    def _start(self) -> None:
        for index, numbers in self._router.assign().items():
            engine = self._pool.engines[index]
            tasks = [(number, self._tasks[number]) for number in numbers]
            forget = self._pool.forgotten.take(engine.maker)
            self._calls[engine.handle.run.remote(tasks, self._router.has_waiting, forget)] = index

    def _take(self, call: Any) -> None:
        pool, index = self._pool, self._calls[call]
        engine = pool.engines[index]
        try:
            report = pool.watch.value(call)
        except WorkerDiedError:
            if not pool.is_lost(engine):
                raise
            return  # it is taken back with all else that the engine had
        del self._calls[call]
        elapsed = time.perf_counter() - self._began
        for number, key, scalars in report.ended:
            self._router.finished(number, index)
            place = pool.forgotten.refer(engine.maker, engine.handle, key)
            chunk = BuffersRef(Chunk(place, self._tasks[number], pool.renew))
            self.places[number], self._made_by[number] = place, index
            self._results[number] = chunk, replace(scalars, seconds_generating=elapsed - scalars.seconds_grading)
            pool.count_lengths(int(scalars.total_tokens.sum()), len(scalars.total_tokens))
        engine.busy_seconds = report.busy_seconds
        self._router.ask(index, Work(report.requests_left, report.requests_left * pool.mean_tokens))

    def _take_back(self, engine: PooledEngine) -> None:
        """What it was given, and what only it has, goes to others."""
        lost = self._pool.engines.index(engine)
        self._engines.discard(lost)
        self._router.leave(lost)
        self._calls = {call: index for call, index in self._calls.items() if index != lost}
        for number in [number for number, index in self._made_by.items() if index == lost]:
            del self._results[number], self._made_by[number], self.places[number]
            self._router.offer(number, self._works[number])
        self._busy_before[lost] = 0.0
