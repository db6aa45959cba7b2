"""Tasks on their way through the rollout engines, also when engines are lost, or take work from each other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mcore_rl.data.records import join_pieces, piece_path
from mcore_rl.errors import WorkerDiedError
from mcore_rl.rollout.router import Router, Work
from mcore_rl.rollout.scalars import join_scalars
from mcore_rl.rollout.stealing import Pieces
from mcore_rl.rollout.tasks import Until
from mcore_rl.runtime.roles.delivery import Chunk, Part, Place
from mcore_rl.types import BuffersRef, Mean, RolloutResult, RolloutScalars, RolloutTask

if TYPE_CHECKING:
    from mcore_rl.runtime.roles.engine_pool import EnginePool, PooledEngine

PART_OF_CALLS = 16
"""The driver waits until one in so many of the calls under way has ended: each look at them costs as much as there are
calls. Of answers to engines that have nothing to do it waits for no more than there may be."""


@dataclass(frozen=True)
class Made:
    """What became of a piece, and the engine that made it."""

    engine: int
    place: Place
    scalars: RolloutScalars


class PoolRun:
    """Tasks on their way through the engines. One call of each is under way: it brings pieces of tasks, and comes back
    with what has ended when the engine asks for more. Beside it, one that asks an engine to give some up."""

    def __init__(self, pool: EnginePool, tasks: Sequence[RolloutTask]) -> None:
        pool.lose_dead()
        self._pool, self._tasks = pool, list(tasks)
        self._pieces = Pieces([task.span for task in tasks])
        self._router = Router(pool.room, steals=pool.steals)
        for number in range(len(tasks)):
            self._offer(number)
        self._engines: set[int] = set()
        """That take part."""
        for index, engine in enumerate(pool.engines):
            if engine.serves:
                self._join(index)
        self._calls: dict[Any, int] = {}
        """Under way, and the engine of each."""
        self._asks: dict[Any, int] = {}
        """As `_calls`, of those that ask it to give some up."""
        self._made: dict[int, Made] = {}
        """Pieces that have ended, by number."""
        self._began = time.perf_counter()
        self._busy_before = [engine.busy_seconds for engine in pool.engines]

    def results(self) -> list[RolloutResult]:
        """In the order of the tasks."""
        pool = self._pool
        # Nobody is asked any more after the end: it would give up what the next run brings.
        while len(self._made) < len(self._pieces) or self._asks:
            self._start()
            if not self._engines:
                pool.supply()
                for index, engine in enumerate(pool.engines):
                    if engine.serves:
                        self._join(index)
                continue
            for call in self._ended():
                if call in self._calls:
                    self._take(call)
                else:
                    self._take_given_up(call)
            makers = [engine.maker for engine in pool.engines]
            for engine in pool.lose_dead():
                self._take_back(engine, makers[pool.engines.index(engine)])
        return [self._result(number) for number in range(len(self._tasks))]

    def parts(self, task: int) -> list[Part]:
        """Where the trajectories of a task are."""
        parts, row = [], 0
        for number in self._pieces.of_task(task):
            made, piece = self._made[number], self._pieces[number]
            rows = len(made.scalars.group_ids)
            parts.append(Part(made.place, row, row + rows, (piece.first, piece.last), made.scalars.digests))
            row += rows
        return parts

    def idle_fraction(self) -> Mean:
        """Of the time of all engines since the run began, what they had nothing to do in."""
        seconds = (time.perf_counter() - self._began) * self._pool.num_engines
        busy = sum(e.busy_seconds - before for e, before in zip(self._pool.engines, self._busy_before, strict=True))
        return Mean(max(0.0, seconds - max(0.0, busy)), seconds)

    def _result(self, number: int) -> RolloutResult:
        task, parts = self._tasks[number], self.parts(number)
        scalars = [self._made[piece].scalars for piece in self._pieces.of_task(number)]
        for part, of_part in zip(parts, scalars, strict=True):
            made, wanted = _num_responses(of_part), part.responses[1] - part.responses[0]
            assert made == wanted, f"{part.place.maker} has made {made} responses of {part}"
        if len(parts) > 1 and task.records is not None:
            join_pieces(task.records, [part.responses[0] - task.span[0] for part in parts])
        chunk = BuffersRef(Chunk(parts, replace(task, journals=()), self._pool.renew))
        return chunk, scalars[0] if len(scalars) == 1 else join_scalars(scalars)

    def _task(self, number: int) -> RolloutTask:
        """The part of its task that a piece is."""
        piece = self._pieces[number]
        task, responses = self._tasks[piece.task], (piece.first, piece.last)
        if responses == task.span:
            return task
        records = None if task.records is None else piece_path(task.records, piece.first - task.span[0])
        return replace(task, responses=responses, records=records)

    def _offer(self, number: int, *, first: bool = False) -> None:
        piece = self._pieces[number]
        self._router.offer(number, self._pool.work(piece.last - piece.first), first=first)

    def _join(self, index: int) -> None:
        self._engines.add(index)
        self._router.ask(index, Work(0, 0.0))

    def _start(self) -> None:
        for index, numbers in self._router.assign().items():
            engine = self._pool.engines[index]
            tasks = [(number, self._task(number)) for number in numbers]
            forget = self._pool.forgotten.take(engine.maker)
            # Who gets nothing now is not given anything before it has ended what it has.
            until = Until.ASKS if tasks and self._router.has_more else Until.ALL
            self._calls[engine.handle.run.remote(tasks, until, forget)] = index
        for index, free in self._router.steal():
            self._asks[self._pool.engines[index].handle.give_up.remote(free)] = index

    def _ended(self) -> list[Any]:
        """Calls that have ended."""
        calls = [*self._calls, *self._asks]
        enough = max(1, len(calls) // PART_OF_CALLS)
        ready, _ = self._pool.watch.wait(calls, min(enough, len(self._asks) or enough))
        return ready

    def _value(self, call: Any, index: int) -> Any:
        """None where the engine is lost: it is taken back with all else that the engine had."""
        try:
            return self._pool.watch.value(call)
        except WorkerDiedError:
            if not self._pool.is_lost(self._pool.engines[index]):
                raise
            return None

    def _take(self, call: Any) -> None:
        pool, index = self._pool, self._calls[call]
        engine = pool.engines[index]
        report = self._value(call, index)
        if report is None:
            return
        del self._calls[call]
        elapsed = time.perf_counter() - self._began
        for number, key, scalars in report.ended:
            self._router.finished(number, index)
            place = pool.forgotten.refer(engine.maker, engine.handle, key)
            pool.count("engine/tokens_taken_over", scalars.tokens_taken_over)
            scalars = replace(scalars, seconds_generating=elapsed - scalars.seconds_grading)
            self._made[number] = Made(index, place, scalars)
            pool.count_lengths(int(scalars.total_tokens.sum()), len(scalars.total_tokens))
        engine.busy_seconds = report.busy_seconds
        self._router.ask(index, pool.work(report.requests_left))

    def _take_given_up(self, call: Any) -> None:
        """What an engine has given up waits again."""
        index = self._asks[call]
        given_up = self._value(call, index)
        if given_up is None:
            return
        del self._asks[call]
        for number, end in given_up.ends:
            rest = self._pieces.cut(number, end)
            piece, other = self._pieces[number], self._pieces[rest]
            if piece.first == piece.last:
                self._router.finished(number, index)
            self._offer(rest, first=True)
            self._pool.count("engine/requests_stolen", other.last - other.first)
        self._router.gave_up(index, given_up.num_unbegun)

    def _take_back(self, engine: PooledEngine, maker: str) -> None:
        """What it was given, and what only it has, goes to others; `maker` is what it was before it was lost."""
        lost = self._pool.engines.index(engine)
        self._engines.discard(lost)
        self._router.leave(lost)
        self._calls = {call: index for call, index in self._calls.items() if index != lost}
        self._asks = {call: index for call, index in self._asks.items() if index != lost}
        for number in [number for number, made in self._made.items() if made.engine == lost]:
            del self._made[number]
            self._offer(number)
        for task in range(len(self._tasks)):
            if any(number not in self._made for number in self._pieces.of_task(task)):
                self._tasks[task] = self._pool.taken_over(self._tasks[task], maker)
        self._busy_before[lost] = 0.0


def _num_responses(scalars: RolloutScalars) -> int:
    """Not counting those of an episode but the first."""
    if scalars.episodes is None:
        return len(scalars.group_ids)
    return len(np.unique(scalars.episodes))
