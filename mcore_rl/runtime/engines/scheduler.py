"""Scheduler of rollout tasks: one queue for all engines of the fleet.

    submit -> queue -> engine: run (waits) or begin (while run waits) -> report -> result
                 ^-- unfinished pieces of lost engines, and unstarted requests that idle engines take over

In a batch (`run`), engines receive tasks as they have room, and idle engines take unstarted requests from others at the
end. In a streaming run (`begin`) engines always have work: each task goes to the least loaded engine at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from mcore_rl.data.records import join_pieces, piece_path
from mcore_rl.errors import WorkerDiedError
from mcore_rl.rollout.results import join_scalars
from mcore_rl.rollout.streaming.interface import SavedTasks
from mcore_rl.rollout.tasks import ROOM, GivenUp, Until
from mcore_rl.runtime.calls import Ref
from mcore_rl.runtime.delivery import Chunk, Part, TrajectoryPlace
from mcore_rl.runtime.engines.balance import EngineKey, FinishedPiece, LoadBalancer, TaskPiece
from mcore_rl.runtime.engines.process import EngineProcess, EngineReport
from mcore_rl.runtime.engines.trajectories import EngineTrajectories, chunk_of, with_journal
from mcore_rl.runtime.health import AnyRef
from mcore_rl.runtime.phases import Phase, staged
from mcore_rl.runtime.progress.responses import shown_responses
from mcore_rl.types import BuffersRef, DraftCounts, Mean, RolloutResult, RolloutScalars, RolloutTask, Total
from mcore_rl.types.copies import changed

T = TypeVar("T")


@dataclass
class Submission:
    """A task. `results` receives the result of a task of `Scheduler.begin`; it is None for a task of `Scheduler.run`,
    which returns the result."""

    task: RolloutTask
    results: dict[int, RolloutResult] | None
    num_finished: int = 0
    """Number of finished pieces."""
    since: float = field(default_factory=time.perf_counter)

    def task_of(self, piece: TaskPiece) -> RolloutTask:
        """Return the piece as a task with a records file of its own."""
        task, responses = self.task, (piece.first, piece.last)
        if responses == task.span:
            return task
        records = None if task.records is None else piece_path(task.records, piece.first - task.span[0])
        return replace(task, responses=responses, records=records)

    def with_queue_time(self, scalars: RolloutScalars) -> RolloutScalars:
        """Include the time in the queue, which engines do not count, for a task of `Scheduler.run`."""
        if self.results is not None:
            return scalars
        seconds = time.perf_counter() - self.since - scalars.seconds_grading
        return changed(scalars, seconds_generating=seconds)

    def result(self, pieces: Sequence[TaskPiece]) -> RolloutResult:
        """Join the results of `pieces`, which are in the order of the responses."""
        parts, scalars, row = [], [], 0
        for piece in pieces:
            assert piece.finished is not None
            found = piece.finished.scalars
            num_responses, rows = _num_responses(found), len(found.group_ids)
            assert num_responses == piece.num_requests, f"{num_responses} responses of {piece}"
            # Rows count trajectories, spans count responses: an episode can have several trajectories.
            parts.append(Part(piece.finished.place, row, row + rows, (piece.first, piece.last), found.digests))
            scalars.append(found)
            row += rows
        # Each piece has written its own file.
        if len(parts) > 1 and self.task.records is not None:
            join_pieces(self.task.records, [part.responses[0] - self.task.span[0] for part in parts])
        return chunk_of(self.task, parts), scalars[0] if len(scalars) == 1 else join_scalars(scalars)


@dataclass
class Scheduler(EngineTrajectories):
    """Runs tasks on the engines of `fleet`. Implements DeferredGradingPool, TaskStream and Attendant.

    Results of finished calls are processed in every wait of the driver. Work of a lost engine is queued again only in
    `wait`, where nothing else is in progress: code that publishes weights handles the loss of an engine itself. The
    work continues from the engine's journal or, without one, is generated again. Both give the same responses, because
    a response depends only on its prompt, its seed and the weights.
    """

    slots_per_engine: int
    """Requests that an engine decodes concurrently."""
    streaming: bool = False
    steals: bool = True
    """True if engines without unstarted requests take unstarted requests from others in a batch."""
    _balance: LoadBalancer = field(init=False)
    _submissions: dict[int, Submission] = field(default_factory=dict, init=False)
    """Unfinished tasks by ticket, and finished tasks of `run`: if an engine is lost, they must be generated again."""
    _num_submitted: int = field(default=0, init=False)
    _unfinished: set[int] = field(default_factory=set, init=False)
    """Tickets of `run` with unfinished pieces."""
    _calls: dict[AnyRef, tuple[EngineKey, Callable[[EngineKey, Any], None] | None]] = field(
        default_factory=dict, init=False
    )
    """Pending calls: {reference: (engine, method that handles the result; None: the result is ignored)}."""
    _idle: set[int] = field(default_factory=set, init=False)
    """Numbers of the engines without a pending call of EngineProcess.run; every other engine has exactly one."""
    _dead: set[EngineKey] = field(default_factory=set, init=False)
    """Engines that are known to be dead, including those that have not been restarted yet."""
    _carried: dict[EngineKey, int] = field(default_factory=dict, init=False)
    """Value of EngineReport.tokens_carried_over in the last report of each engine."""
    _drafts: dict[EngineKey, DraftCounts] = field(default_factory=dict, init=False)
    """Value of EngineReport.drafts in the last report of each engine."""
    _gathers: bool = field(default=False, init=False)
    _num_restarts: int = field(default=0, init=False)
    """Value of Fleet.num_restarts when lost pieces were last queued again."""
    _looked: float = field(default_factory=time.perf_counter, init=False)
    _busy_before: dict[EngineKey, float] = field(default_factory=dict, init=False)
    _on_end: Callable[[], None] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        room = None if self.streaming else ROOM * self.slots_per_engine
        self._balance = LoadBalancer(room, steals=self.steals, serves=self._serves)
        self._idle = set(range(self.fleet.num_engines))
        self.fleet.watch.attendant = self

    @property
    def num_engines(self) -> int:
        return self.fleet.num_engines

    @property
    def running_requests(self) -> int:
        return self._balance.running_requests

    @property
    def slots(self) -> int:
        """Number of requests that all engines with weights decode concurrently."""
        return self.slots_per_engine * max(1, len(self.fleet.serving))

    def attend(self, heard: Callable[[], None]) -> None:
        """Set a callback for finished tasks. It is called in any wait of the driver, and must not wait itself."""
        self._on_end = heard

    @staged(None, Phase.GENERATE)  # no span: a part of `rollout` or `validate`
    def run(self, tasks: Sequence[RolloutTask]) -> list[RolloutResult]:
        """Generate all tasks with the current weights; results are in the order of the tasks.

        Raises: WorkerDiedError if an engine is lost after `max_restarts` restarts.
        """
        if not self.streaming:
            self.idle_fraction()  # starts a new interval
        results = self.generate([changed(task, version=self.fleet.version) for task in tasks])
        if not self.streaming and all(task.prompt_set == "train" for task in tasks):
            self.fleet.add_metric("engine/idle_fraction", self.idle_fraction())
        return results

    @contextmanager
    def together(self) -> Iterator[None]:
        """Send all tasks that begin in the block at its end, with fewer calls."""
        outer, self._gathers = self._gathers, True
        try:
            yield
        finally:
            self._gathers = outer
        if not outer:
            self._assign()

    def wait(self) -> None:
        """Wait until a call has ended or SECONDS_BETWEEN_LOOKS have passed. Call it only where the driver does nothing
        else.

        Raises: as Watch.wait; WorkerDiedError if an engine is lost after `max_restarts` restarts.
        """
        self._recover()
        self.fleet.watch.wait([], 0)

    def rest(self) -> None:
        """Wait until every request has ended or waits for the next weights."""
        while self._balance.queue or not self.fleet.retry_on_engine_loss(self._rests):
            self.wait()

    def _rests(self) -> bool:
        calls = [
            engine.process.call(EngineProcess.num_running) for engine in self.fleet.engines if self._serves(engine.key)
        ]
        counts = self.fleet.watch.get(calls)
        num_tasks, num_running = sum(tasks for tasks, _ in counts), sum(running for _, running in counts)
        return num_tasks == len(self._submissions) and not num_running

    def save(self, directory: Path, chunks: Sequence[BuffersRef], tickets: Sequence[int]) -> SavedTasks:
        """Write trajectories and running requests (see TaskStream.save); each engine writes its own part."""
        kept, latest = [cast(Chunk, chunk) for chunk in chunks], dict[int, tuple[RolloutTask, EngineKey | None]]()

        def save() -> SavedTasks:
            self._recover()
            self.renew(kept)
            # In a retry a task may have finished meanwhile; its requests are still in the journal of its engine.
            latest.update({ticket: self._located(ticket) for ticket in tickets if ticket in self._submissions})
            return self.save_tasks(directory, kept, latest.values())

        return self.fleet.retry_on_engine_loss(save)

    def idle_fraction(self) -> Mean:
        """Return the fraction of the engines' time since the last call in which they had no requests."""
        now = time.perf_counter()
        elapsed, self._looked = now - self._looked, now
        seconds = elapsed * self.num_engines
        busy = {engine.key: engine.busy_seconds for engine in self.fleet.engines}
        # A report also covers time before the last call, so an engine counts as busy for at most the elapsed time.
        worked = sum(min(elapsed, value - self._busy_before.get(key, 0.0)) for key, value in busy.items())
        self._busy_before = busy
        return Mean(max(0.0, seconds - max(0.0, worked)), seconds)

    def calls(self) -> list[AnyRef]:
        """Implement Attendant.calls."""
        return list(self._calls)

    def ended(self, calls: Sequence[AnyRef]) -> None:
        """Implement Attendant.ended."""
        for call in calls:
            key, take = self._calls.pop(call)
            if take == self._take_report:
                self._idle.add(key.number)
            value = self._value(call, key)
            if take is not None and value is not None:
                take(key, value)
        with self.together():  # send tasks that begin now with the next `run` call of an engine
            if self._on_end is not None:
                self._on_end()

    def begin(self, task: RolloutTask, results: dict[int, RolloutResult] | None) -> int:
        """Submit a task without waiting; its result is put into `results` under the returned ticket. `results` is None
        for tasks of `run`."""
        ticket, self._num_submitted = self._num_submitted, self._num_submitted + 1
        self._submissions[ticket] = Submission(task, results)
        if results is None:
            self._unfinished.add(ticket)
        self._balance.add(ticket, *task.span)
        if not self._gathers:
            self._assign()
        return ticket

    def generate(self, tasks: Sequence[RolloutTask]) -> list[RolloutResult]:
        with self.together():
            tickets = [self.begin(task, None) for task in tasks]
        with shown_responses(self.stages.board, self.fleet, tasks, tickets, self._balance.pieces):
            while True:
                self._recover()
                # Wait for answers to steals too: a later answer would give up requests of the next run.
                if not (self._unfinished or self._balance.is_stealing):
                    return [self._result(ticket) for ticket in tickets]
                self.fleet.watch.wait([], 0)

    def _take_report(self, key: EngineKey, report: EngineReport) -> None:
        engine, fleet = self.fleet.engines[key.number], self.fleet
        engine.busy_seconds = report.busy_seconds
        if self.streaming:
            carried_over = report.tokens_carried_over - self._carried.get(key, 0)
            fleet.add_metric("engine/tokens_carried_over", Total(carried_over))
            self._carried[key] = report.tokens_carried_over
        if report.drafts is not None:
            for name, metric in (report.drafts - self._drafts.get(key, DraftCounts.zero(1))).metrics():
                fleet.add_metric(name, metric)
            self._drafts[key] = report.drafts
        taken_over = sum(scalars.tokens_taken_over for *_, scalars in report.ended)
        fleet.add_metric("engine/tokens_taken_over", Total(taken_over))
        for number, kept_key, scalars in report.ended:
            place = fleet.released.refer(engine.producer, engine.process, kept_key)
            self._finish(number, key, place, scalars)
        self._balance.report(key, report.requests_received, report.requests_left)

    def _finish(self, number: int, engine: EngineKey, place: TrajectoryPlace, scalars: RolloutScalars) -> None:
        piece = self._balance.finished(number)
        ticket, submission = piece.task, self._submissions[piece.task]
        piece.finished = FinishedPiece(engine, place, submission.with_queue_time(scalars))
        submission.num_finished += 1
        # Counted, because stealing may split a task into as many pieces as there are engines.
        if submission.num_finished < self._balance.num_pieces(ticket):
            return
        if submission.results is None:
            self._unfinished.discard(ticket)
        else:
            submission.results[ticket] = self._result(ticket)

    def _take_given_up(self, key: EngineKey, given_up: GivenUp) -> None:
        # The cut-off responses become a new piece, even of a task whose pieces have all ended.
        self._unfinished |= {self._balance.pieces[number].task for number, _ in given_up.ends}
        moved = self._balance.gave_up(key, given_up.ends, given_up.num_unstarted)
        if moved:
            self.fleet.add_metric("engine/requests_stolen", Total(moved))

    def _result(self, ticket: int) -> RolloutResult:
        """Return the result of a finished task and drop the task."""
        pieces = self._balance.of_task(ticket)
        self._balance.drop(ticket)
        return self._submissions.pop(ticket).result(pieces)

    def _value(self, call: Ref[T], key: EngineKey) -> T | None:
        """Return the result of a call; None if its engine is lost."""
        engine = self.fleet.engines[key.number]
        if engine.key != key:  # the engine was already restarted, which handled the failure
            return None
        try:
            return self.fleet.watch.value(call)
        except WorkerDiedError:
            if not self.fleet.is_lost(engine):
                raise
            # The engine is restarted later, by `wait` or by a publish. Until then, no task may go to it.
            self._dead.add(key)
            return None

    def _serves(self, key: EngineKey) -> bool:
        """Return whether the engine has weights and is not known to be dead."""
        engine = self.fleet.engines[key.number]
        return engine.serves and engine.incarnation == key.incarnation and key not in self._dead

    def _assign(self) -> None:
        """Send queued pieces to engines, and ask engines to give up requests for idle ones."""
        engines, pieces = self.fleet.engines, self._balance.pieces
        idle = [key for key in [engines[index].key for index in self._idle] if self._serves(key)]
        for key in idle:
            if key not in self._balance.candidates:
                self._balance.join(key)
        given = self._balance.assign()
        if self.streaming:  # one call always waits at each engine
            given |= {key: [] for key in idle if key not in given}
        # In a batch, an engine reports before its tasks have ended only if it might be given more requests then.
        until = Until.ANY if self.streaming else Until.ASKS if self._balance.has_more else Until.ALL
        for key, numbers in given.items():
            engine, given_pieces = engines[key.number], [(number, pieces[number]) for number in numbers]
            tasks = [(number, self._submissions[piece.task].task_of(piece)) for number, piece in given_pieces]
            if key.number in self._idle:
                self._idle.remove(key.number)
                released = self.fleet.released.take(engine.producer)
                # An engine that gets no task now gets none until its present tasks have ended, so it need not report
                # before.
                condition = until if tasks or self.streaming else Until.ALL
                self._calls[engine.process.call(EngineProcess.run, tasks, condition, released)] = key, self._take_report
            elif tasks:
                self._calls[engine.process.call(EngineProcess.begin, tasks)] = key, None
        for key, free in self._balance.steal():
            self._calls[engines[key.number].process.call(EngineProcess.give_up, free)] = key, self._take_given_up

    def _recover(self) -> None:
        """Restart lost engines and queue their work for others."""
        self.fleet.reap_failed()
        if self._num_restarts != self.fleet.num_restarts:
            self._num_restarts = self.fleet.num_restarts
            self._requeue_lost()
        # Every engine was replaced since its last weights: without new ones, no task would ever run.
        if not any(engine.serves for engine in self.fleet.engines):
            self.supply()
        self._assign()

    def _requeue_lost(self) -> None:
        """Queue unfinished pieces of engines that were replaced, and finished ones that `run` has not returned."""
        serving = {engine.key for engine in self.fleet.serving}
        lost = {*self._balance.given, *self._carried, *self._drafts} - serving
        again: set[tuple[int, EngineKey]] = set()
        finished = []
        for number, piece in self._balance.pieces.items():
            key = piece.engine if piece.finished is None else piece.finished.engine
            if key is None or key not in lost:
                continue
            again.add((piece.task, key))
            if piece.finished is not None:
                piece.finished = None
                self._submissions[piece.task].num_finished -= 1
                self._unfinished.add(piece.task)
                finished.append((piece.task, number))
        self._balance.requeue([number for _, number in sorted(finished)])
        self._balance.leave(lost)
        for ticket, key in sorted(again):
            submission, journal = self._submissions[ticket], self.fleet.lost_journals.get(self.fleet.producer_of(key))
            submission.task = with_journal(submission.task, journal)
        for key in lost:
            self._carried.pop(key, None)
            self._drafts.pop(key, None)
        # The replacements have no `run` call yet. Results of calls to the lost processes are not awaited any more.
        self._idle |= {key.number for key, take in self._calls.values() if key in lost and take == self._take_report}
        self._calls = {call: (key, take) for call, (key, take) in self._calls.items() if key not in lost}

    def _located(self, ticket: int) -> tuple[RolloutTask, EngineKey | None]:
        (piece,) = self._balance.of_task(ticket)  # streaming tasks are not split
        return self._submissions[ticket].task, piece.engine


def _num_responses(scalars: RolloutScalars) -> int:
    """Count the responses; an episode with several trajectories counts once."""
    if scalars.episodes is None:
        return len(scalars.group_ids)
    return len(np.unique(scalars.episodes))
