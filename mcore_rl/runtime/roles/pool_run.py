"""Tasks on their way through the rollout engines, also when engines are lost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mcore_rl.errors import WorkerDiedError
from mcore_rl.rollout.router import Router, Work
from mcore_rl.runtime.roles.delivery import Chunk, Place
from mcore_rl.types import BuffersRef, Mean, RolloutResult, RolloutTask

if TYPE_CHECKING:
    from mcore_rl.runtime.roles.engine_pool import EnginePool, PooledEngine

PART_OF_CALLS = 16
"""The driver waits until one in so many of the calls under way has ended: each look at them costs as much as there are
calls."""


class PoolRun:
    """Tasks on their way through the engines. One call of each is under way: it brings tasks, and comes back with what
    has ended when the engine asks for more."""

    def __init__(self, pool: EnginePool, tasks: Sequence[RolloutTask]) -> None:
        pool.lose_dead()
        self._pool, self._tasks = pool, list(tasks)
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
            makers = [engine.maker for engine in pool.engines]
            for engine in pool.lose_dead():
                self._take_back(engine, makers[pool.engines.index(engine)])
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
            pool.count("engine/tokens_taken_over", scalars.tokens_taken_over)
            chunk = BuffersRef(Chunk(place, replace(self._tasks[number], journals=()), pool.renew))
            self.places[number], self._made_by[number] = place, index
            self._results[number] = chunk, replace(scalars, seconds_generating=elapsed - scalars.seconds_grading)
            pool.count_lengths(int(scalars.total_tokens.sum()), len(scalars.total_tokens))
        engine.busy_seconds = report.busy_seconds
        self._router.ask(index, Work(report.requests_left, report.requests_left * pool.mean_tokens))

    def _take_back(self, engine: PooledEngine, maker: str) -> None:
        """What it was given, and what only it has, goes to others; `maker` is what it was before it was lost."""
        lost = self._pool.engines.index(engine)
        self._engines.discard(lost)
        self._router.leave(lost)
        self._calls = {call: index for call, index in self._calls.items() if index != lost}
        for number in [number for number, index in self._made_by.items() if index == lost]:
            del self._results[number], self._made_by[number], self.places[number]
            self._router.offer(number, self._works[number])
        for number, task in enumerate(self._tasks):
            if number not in self._results:
                self._tasks[number] = self._pool.taken_over(task, maker)
        self._busy_before[lost] = 0.0
