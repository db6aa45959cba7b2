"""Tasks that come to the engines one by one, while others run, and leave them as they end: nobody waits for a batch."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mcore_rl.errors import WorkerDiedError
from mcore_rl.rollout.streaming.interface import TRAJECTORIES, SavedTasks
from mcore_rl.rollout.tasks import Until
from mcore_rl.runtime.roles.delivery import Chunk, Part, Place
from mcore_rl.types import BuffersRef, Mean, RolloutResult, RolloutScalars, RolloutTask

if TYPE_CHECKING:
    from mcore_rl.runtime.roles.engine import Report
    from mcore_rl.runtime.roles.engine_pool import EnginePool
    from mcore_rl.runtime.roles.pooled_engine import PooledEngine

MOST_PER_ENGINE = 16
"""Of the loads that are noted for each engine, all but one are out of date: they are dropped when there are so many."""


@dataclass
class Underway:
    """A task, who takes what comes of it, and the engine that has it, as it was called then; None: nobody has it."""

    task: RolloutTask
    results: dict[int, RolloutResult]
    engine: int | None = None
    maker: str = ""


@dataclass(frozen=True)
class Poll:
    """A call that waits until something has ended on an engine, as it was called then."""

    engine: int
    maker: str


@dataclass
class EngineStream:
    """The tasks of a run under way on the engines of `pool`: an Attendant of its watch, and a TaskStream.

    A task goes, whole, to the engine that has fewest requests under way. At each engine one call waits for something to
    end; where that is under way, another brings tasks. `slots` are requests that an engine has under way together.

    Whatever ends is taken in every wait of the driver. What an engine that died had is given to others in `wait` only,
    where nothing else is in progress: whoever publishes weights meanwhile finds that it died, and starts it again.
    """

    pool: EnginePool
    slots_per_engine: int
    _heard: Callable[[], None] | None = None
    _tickets: itertools.count[int] = field(default_factory=itertools.count)
    _turns: itertools.count[int] = field(default_factory=itertools.count)
    _underway: dict[int, Underway] = field(default_factory=dict)
    _homeless: deque[int] = field(default_factory=deque)
    """Tickets of tasks that no engine has."""
    _polls: dict[Any, Poll] = field(default_factory=dict)
    _begins: dict[Any, Poll] = field(default_factory=dict)
    _unpolled: set[int] = field(default_factory=set)
    """Engines at which no call waits."""
    _loads: dict[str, int] = field(default_factory=dict)
    """Requests under way, by maker: of those that it was given, all that it has not said to have ended."""
    _told: dict[str, Report] = field(default_factory=dict)
    """The last report of each maker, without its tasks."""
    _dead: set[str] = field(default_factory=set)
    """Makers that were seen to have died: nobody asks them anything, also where they have not started again yet."""
    _heap: list[tuple[int, int]] = field(default_factory=list)
    """(requests, engine), among them some that are no longer so."""
    _gathers: bool = False
    """Whether what begins is not given to engines one by one."""
    _num_requests: int = 0
    """Under way, with those that no engine has."""
    _num_restarts: int = 0
    """Of engines, when it was looked for the last time at which tasks they had."""
    _looked: float = field(default_factory=time.perf_counter)
    _busy_before: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool.watch.attendant = self
        self._unpolled = set(range(self.pool.num_engines))

    def attend(self, heard: Callable[[], None]) -> None:
        """`heard` is called when tasks have ended, in any wait of the driver; it must not wait itself."""
        self._heard = heard

    @property
    def num_engines(self) -> int:
        return self.pool.num_engines

    @property
    def running_requests(self) -> int:
        return self._num_requests

    @property
    def slots(self) -> int:
        """Requests that all engines that have weights have under way together."""
        return self.slots_per_engine * max(1, sum(engine.serves for engine in self.pool.engines))

    def begin(self, task: RolloutTask, results: dict[int, RolloutResult]) -> int:
        """The ticket of a task, which begins as soon as some engine can; what comes of it is put into `results`."""
        ticket = next(self._tickets)
        self._underway[ticket] = Underway(task, results)
        self._num_requests += task.num_responses
        self._homeless.append(ticket)
        if not self._gathers:
            self._place()
        return ticket

    @contextmanager
    def together(self) -> Iterator[None]:
        """As TaskStream.together."""
        outer, self._gathers = self._gathers, True
        try:
            yield
        finally:
            self._gathers = outer
        if not outer:
            self._place()

    def wait(self) -> None:
        """Until something has ended, or a while has passed. To be called where the driver does nothing else.

        Raises: as Watch.wait; WorkerDiedError when an engine was lost once too often.
        """
        self._mend()
        self.pool.watch.wait([], 0)

    def rest(self) -> None:
        """As TaskStream.rest."""
        while self._homeless or not self.pool.insist(self._rests):
            self.wait()

    def _rests(self) -> bool:
        handles = [engine.handle for index, engine in enumerate(self.pool.engines) if self._serves(index)]
        counts = self.pool.watch.get([handle.num_running.remote() for handle in handles])
        return sum(tasks for tasks, _ in counts) == len(self._underway) and not any(running for _, running in counts)

    def run(self, tasks: Sequence[RolloutTask]) -> list[RolloutResult]:
        """As EnginePool.run, beside what is under way."""
        results: dict[int, RolloutResult] = {}
        with self.together():
            tickets = [self.begin(task, results) for task in tasks]
        while len(results) < len(tickets):
            self.wait()
        return [results[ticket] for ticket in tickets]

    def save(self, directory: Path, chunks: Sequence[BuffersRef], tickets: Sequence[int]) -> SavedTasks:
        """As TaskStream.save: each engine writes what it has."""
        kept, last = [cast(Chunk, chunk) for chunk in chunks], dict[int, Underway]()

        def save() -> SavedTasks:
            self._mend()
            self.pool.renew(kept)
            # What ends meanwhile is where it was.
            last.update({ticket: self._underway[ticket] for ticket in tickets if ticket in self._underway})
            return self._saved(directory, kept, list(last.values()))

        return self.pool.insist(save)

    def _saved(self, directory: Path, chunks: Sequence[Chunk], underway: Sequence[Underway]) -> SavedTasks:
        index_of = {engine.maker: index for index, engine in enumerate(self.pool.engines)}
        keys: dict[int, list[int]] = {index: [] for index in index_of.values()}
        request_ids: dict[int, list[str]] = {index: [] for index in index_of.values()}
        places = []
        for chunk in chunks:
            (part,) = chunk.parts  # a task of the stream is made by one engine
            index = index_of[part.place.maker]
            places.append((f"engine_{index}{TRAJECTORIES}", len(keys[index])))
            keys[index].append(part.place.key)
        for entry in underway:
            if entry.maker in index_of:
                request_ids[index_of[entry.maker]] += entry.task.request_ids
        calls = [
            self.pool.engines[index].handle.save_tasks.remote(
                str(directory / f"engine_{index}"), keys[index], request_ids[index]
            )
            for index in index_of.values()
            if keys[index] or request_ids[index]
        ]
        files = [file for of_engine in self.pool.watch.get(calls) for file in of_engine]
        return SavedTasks(places, files)

    def restore(self, path: Path, made: Sequence[tuple[RolloutTask, RolloutScalars]]) -> list[BuffersRef]:
        """As TaskStream.restore: engines take files in turn."""
        request_ids = [task.request_ids for task, _ in made]

        def restore() -> tuple[PooledEngine, list[int]]:
            engine = self.pool.engines[next(self._turns) % self.pool.num_engines]
            (keys,) = self.pool.watch.get([engine.handle.restore_tasks.remote(str(path), request_ids)])
            return engine, keys

        engine, keys = self.pool.insist(restore)
        chunks = []
        for key, (task, scalars) in zip(keys, made, strict=True):
            place = self.pool.forgotten.refer(engine.maker, engine.handle, key)
            chunks.append(self._chunk(task, _whole(place, task, scalars)))
        return chunks

    def calls(self) -> list[Any]:
        """As Attendant.calls."""
        return [*self._polls, *self._begins]

    def ended(self, calls: Sequence[Any]) -> None:
        """As Attendant.ended."""
        for call in calls:
            if (poll := self._polls.pop(call, None)) is not None:
                self._unpolled.add(poll.engine)
                self._take(call, poll)
            elif (poll := self._begins.pop(call, None)) is not None:
                self._value(call, poll)
        with self.together():  # what begins now goes with the call that waits for the next end
            if self._heard is not None:
                self._heard()

    def idle_fraction(self) -> Mean:
        """Of the time of all engines since the last call, what they had nothing to do in."""
        now = time.perf_counter()
        elapsed, self._looked = now - self._looked, now
        seconds = elapsed * self.pool.num_engines
        busy = {engine.maker: engine.busy_seconds for engine in self.pool.engines}
        worked = sum(min(elapsed, value - self._busy_before.get(maker, 0.0)) for maker, value in busy.items())
        self._busy_before = busy
        return Mean(max(0.0, seconds - max(0.0, worked)), seconds)

    def _take(self, call: Any, poll: Poll) -> None:
        report: Report | None = self._value(call, poll)
        engine = self.pool.engines[poll.engine]
        if report is None:
            return
        self._learn(poll, report)
        for ticket, key, scalars in report.ended:
            entry = self._underway.pop(ticket)
            self.pool.count("engine/tokens_taken_over", scalars.tokens_taken_over)
            self.pool.count_lengths(int(scalars.total_tokens.sum()), len(scalars.total_tokens))
            place = self.pool.forgotten.refer(engine.maker, engine.handle, key)
            entry.results[ticket] = self._chunk(entry.task, _whole(place, entry.task, scalars)), scalars

    def _learn(self, poll: Poll, report: Report) -> None:
        """What an engine has done since its last report."""
        before = self._told.get(poll.maker)
        self._told[poll.maker] = replace(report, ended=[])
        self.pool.engines[poll.engine].busy_seconds = report.busy_seconds
        ended, carried = report.requests_ended, report.tokens_carried_over
        if before is not None:
            ended, carried = ended - before.requests_ended, carried - before.tokens_carried_over
        self._num_requests -= ended
        self._count(poll.engine, -ended)
        self.pool.count("engine/tokens_carried_over", carried)

    def _chunk(self, task: RolloutTask, part: Part) -> BuffersRef:
        # Who makes it again waits for it, while no weights come.
        again = replace(task, journals=(), tokens_per_version=None, spans=())
        return BuffersRef(Chunk([part], again, self.pool.renew))

    def _value(self, call: Any, poll: Poll) -> Any:
        """None where the engine is lost: what it had is given to others."""
        engine = self.pool.engines[poll.engine]
        if engine.maker != poll.maker:  # somebody has started it again; a failure would wait for a death in vain
            return None
        try:
            return self.pool.watch.value(call)
        except WorkerDiedError:
            if not self.pool.is_lost(engine):
                raise
            self._dead.add(poll.maker)
            return None

    def _serves(self, index: int) -> bool:
        """Whether it has weights and lives, as far as is known."""
        engine = self.pool.engines[index]
        return engine.serves and engine.maker not in self._dead

    def _place(self) -> None:
        """Gives the tasks that nobody has to the engines that have fewest requests."""
        given: dict[int, list[tuple[int, RolloutTask]]] = {}
        for number in self._unpolled:  # among them all that have weights again
            self._count(number, 0)
        while self._homeless and (index := self._least_loaded()) is not None:
            ticket = self._homeless.popleft()
            entry = self._underway[ticket]
            entry.engine, entry.maker = index, self.pool.engines[index].maker
            self._count(index, entry.task.num_responses)
            given.setdefault(index, []).append((ticket, entry.task))
        for index in {*given, *self._unpolled}:
            engine, tasks = self.pool.engines[index], given.get(index, [])
            if index in self._unpolled and self._serves(index):
                self._unpolled.remove(index)
                forget = self.pool.forgotten.take(engine.maker)
                self._polls[engine.handle.run.remote(tasks, Until.ANY, forget)] = Poll(index, engine.maker)
            elif tasks:
                self._begins[engine.handle.begin.remote(tasks)] = Poll(index, engine.maker)

    def _least_loaded(self) -> int | None:
        """Of the engines that serve; None where there is none."""
        while self._heap:
            load, index = self._heap[0]
            if self._serves(index) and self._load(index) == load:
                return index
            heapq.heappop(self._heap)
        return None

    def _load(self, index: int) -> int:
        return self._loads.get(self.pool.engines[index].maker, 0)

    def _count(self, index: int, requests: int) -> None:
        self._loads[self.pool.engines[index].maker] = load = self._load(index) + requests
        heapq.heappush(self._heap, (load, index))
        if len(self._heap) > MOST_PER_ENGINE * self.num_engines:
            self._heap = sorted((self._load(engine), engine) for engine in range(self.num_engines))

    def _mend(self) -> None:
        """What engines had that are lost begins on others, where they had come to."""
        pool = self.pool
        pool.lose_dead()
        if self._num_restarts != pool.num_restarts:  # since when nobody has looked at all that is under way
            self._num_restarts = pool.num_restarts
            self._take_back()
        if not any(engine.serves for engine in pool.engines):
            pool.supply()
        self._place()

    def _take_back(self) -> None:
        """All that is under way at engines that do not serve, or that have started again."""
        pool = self.pool
        makers = {engine.maker for engine in pool.engines if engine.serves}
        placed = {ticket: entry for ticket, entry in self._underway.items() if entry.engine is not None}
        lost = {ticket: entry for ticket, entry in placed.items() if entry.maker not in makers}
        for maker in self._loads.keys() - makers:
            self._num_requests -= self._loads.pop(maker)
            self._told.pop(maker, None)
        for ticket, entry in lost.items():
            self._num_requests += entry.task.num_responses  # its journal says which of them have ended
            self._underway[ticket] = Underway(pool.taken_over(entry.task, entry.maker), entry.results)
        self._homeless.extendleft(sorted(lost, reverse=True))
        for call in [call for call, poll in self._polls.items() if poll.maker not in makers]:
            self._unpolled.add(self._polls.pop(call).engine)
        self._begins = {call: poll for call, poll in self._begins.items() if poll.maker in makers}


def _whole(place: Place, task: RolloutTask, scalars: RolloutScalars) -> Part:
    """All trajectories of a task."""
    return Part(place, 0, len(scalars.group_ids), task.span, scalars.digests)
