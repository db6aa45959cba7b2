"""Tasks of rollouts: their size, and the thread pool that runs them concurrently on one engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import NamedTuple

import numpy as np

from mcore_rl.types import RolloutScalars, RolloutTask, TrajectoryBuffers

TASKS_PER_ENGINE = 2
"""Minimum number of tasks per engine. With smaller tasks, engines finish at more equal times, but the driver makes more
calls."""
TASKS_PER_BATCH = 2
"""Minimum number of tasks in the requests that an engine decodes concurrently."""
ROOM = 2
"""Requests that an engine may hold in any case, in multiples of the requests that it decodes concurrently, and its
maximum number of tasks. It reports when one multiple is left. Until the driver sends more, it starts queued requests in
place of finished ones."""


def cut(num_groups: int, samples: int, num_engines: int, num_concurrent: int) -> list[np.ndarray]:
    """Return the indices of the groups of each task. An engine decodes `num_concurrent` requests concurrently.

    The order of groups is kept, so that the order of responses does not depend on the number or speed of engines.
    Groups stay whole, because their samples share the prompt in an engine's prefix cache.
    """
    # A single engine has nobody to share with, so more tasks would only cost calls.
    if num_engines == 1:
        return [np.arange(num_groups)] if num_groups else []
    max_groups = max(1, num_concurrent // (TASKS_PER_BATCH * samples))
    parts = max(num_engines * TASKS_PER_ENGINE, -(-num_groups // max_groups))
    return [part for part in np.array_split(np.arange(num_groups), parts) if len(part)]


def split(
    task: RolloutTask, num_engines: int, num_concurrent: int, records: Callable[[int], str] | None = None
) -> list[RolloutTask]:
    """Split a task as described in `cut`. `records` returns the file for the records of each part."""
    parts = cut(len(task.group_ids), task.samples_per_prompt, num_engines, num_concurrent)
    tasks = []
    for number, part in enumerate(parts):
        rows, ids = task.prompt_rows[part], task.group_ids[part]
        file = None if records is None else records(number)
        tasks.append(replace(task, prompt_rows=rows, group_ids=ids, records=file))
    return tasks


@dataclass(frozen=True)
class Tail:
    """Unstarted responses at the end of a task, from `first` up to `last` (exclusive), in groups of `samples`."""

    task: int
    first: int
    last: int
    samples: int


def share(tails: Sequence[Tail], free: int) -> list[Tail]:
    """Select the responses that move to an engine with `free` slots, so that both engines then have equally many
    waiting.

    Whole groups move, from the end of the last tasks; a part of a group moves only if one group is too many. At least
    one response moves if there is any.
    """
    waiting = sum(tail.last - tail.first for tail in tails)
    left = target = min(waiting, (waiting + free + 1) // 2)
    shared: list[Tail] = []
    for tail in reversed(tails):
        first = tail.last
        while first > tail.first:
            # Start of the group that contains response `first` - 1, as far as it belongs to this tail.
            begin = max(tail.first, (first - 1) // tail.samples * tail.samples)
            if first - begin > left:
                break
            left -= first - begin
            first = begin
        if first < tail.last:
            shared.append(Tail(tail.task, first, tail.last, tail.samples))
        if first > tail.first:  # the next group is too large
            break
    # Not even one whole group was small enough: move a part of the last one.
    if left == target > 0:
        last = next(tail for tail in reversed(tails) if tail.last > tail.first)
        return [Tail(last.task, last.last - target, last.last, last.samples)]
    return shared


@dataclass(frozen=True)
class RequestCallbacks:
    """Callbacks for each request of a task that is not withdrawn; called from any thread."""

    started: Callable[[], None]
    ended: Callable[[], None]


NO_CALLBACKS = RequestCallbacks(lambda: None, lambda: None)
Run = Callable[[RolloutTask, RequestCallbacks], tuple[TrajectoryBuffers, RolloutScalars] | None]
"""RolloutWorker.run."""
Withdraw = Callable[[Callable[[Collection[str]], Collection[str]]], None]
"""Player.withdraw."""


class Until(Enum):
    """Condition that ends an exchange: all tasks have ended; the engine can take more, or all have ended; any has."""

    ALL = "all"
    ASKS = "asks"
    ANY = "any"


@dataclass(frozen=True)
class Finished:
    """A finished task, by the number that the driver gave it. `request_ids`: its responses, except for withdrawn
    ones."""

    number: int
    request_ids: list[str]
    buffers: TrajectoryBuffers
    scalars: RolloutScalars


class RunnerReport(NamedTuple):
    """Tasks that finished since the last exchange, requests received so far, and received requests that have neither
    ended nor been given up."""

    finished: list[Finished]
    requests_received: int
    requests_left: int


@dataclass(frozen=True)
class GivenUp:
    """(number of a task, response at which it ends now) of each shortened task, and the number of unstarted requests
    that are left."""

    ends: list[tuple[int, int]]
    num_unstarted: int


class TaskRunner:
    """Calls `run` for each task in one of `num_threads` threads; other tasks wait. The engine can take more when all
    requests have started and fewer than `low` are left. `withdraw` removes requests from the engine."""

    def __init__(self, run: Run, withdraw: Withdraw, *, num_threads: int, low: int) -> None:
        self._run, self._withdraw, self._low = run, withdraw, low
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="task")
        self._changed = threading.Condition()
        self._tasks: dict[int, RolloutTask] = {}
        """Unfinished tasks in order of arrival, with the responses that have not been given up."""
        self._requests_received = self._requests_left = self._unstarted = 0
        self._ended: dict[int, int] = {}
        """Ended requests of each unfinished task."""
        self._finished: list[Finished] = []
        self._error: BaseException | None = None

    def begin(self, tasks: Sequence[tuple[int, RolloutTask]]) -> None:
        """Start (number, task) pairs, concurrently with the others."""
        with self._changed:
            for number, task in tasks:
                self._tasks[number], self._ended[number] = task, 0
                self._requests_received += task.num_responses
                self._requests_left += task.num_responses
                self._unstarted += task.num_responses
                self._pool.submit(self._do, number, task)

    def exchange(self, tasks: Sequence[tuple[int, RolloutTask]], until: Until) -> RunnerReport:
        """Start `tasks` and wait.

        Raises: the first error of any task; results of the others are lost.
        """
        reached = {
            Until.ALL: lambda: not self._tasks,
            Until.ASKS: lambda: not self._tasks or (not self._unstarted and self._requests_left < self._low),
            Until.ANY: lambda: bool(self._finished),
        }[until]
        with self._changed:
            # The lock of a Condition is reentrant: `begin` acquires it again.
            self.begin(tasks)
            self._changed.wait_for(lambda: self._error or reached())
            if self._error is not None:
                raise self._error
            finished, self._finished = self._finished, []
            return RunnerReport(finished, self._requests_received, self._requests_left)

    @property
    def num_left(self) -> tuple[int, int]:
        """Numbers of unfinished tasks and requests."""
        with self._changed:
            return len(self._tasks), self._requests_left

    @property
    def num_ended(self) -> dict[int, int]:
        """Numbers of ended requests of the unfinished tasks."""
        with self._changed:
            return dict(self._ended)

    def give_up(self, free: int) -> GivenUp:
        """Withdraw unstarted requests at the ends of tasks, for an engine with `free` slots (see `share`)."""
        ends: list[tuple[int, int]] = []

        def choose(unstarted: Collection[str]) -> list[str]:
            with self._changed:
                chosen = share([self._tail(number, task, unstarted) for number, task in self._tasks.items()], free)
                request_ids = []
                for tail in chosen:
                    task = self._tasks[tail.task]
                    request_ids += [task.request_id(response) for response in range(tail.first, tail.last)]
                    self._tasks[tail.task] = replace(task, responses=(task.span[0], tail.first))
                ends.extend((tail.task, tail.first) for tail in chosen)
                self._requests_left -= len(request_ids)
                self._unstarted -= len(request_ids)
                self._changed.notify_all()
            return request_ids

        # Returns after the engine's thread has called `choose` between two steps.
        self._withdraw(choose)
        with self._changed:
            return GivenUp(ends, self._unstarted)

    def _tail(self, number: int, task: RolloutTask, unstarted: Collection[str]) -> Tail:
        first, last = task.span
        # Only from the end, because a task is one range of responses.
        begin = last
        while begin > first and task.request_id(begin - 1) in unstarted:
            begin -= 1
        return Tail(number, begin, last, task.samples_per_prompt)

    def _do(self, number: int, task: RolloutTask) -> None:
        try:
            result = self._run(task, RequestCallbacks(self._begin_request, partial(self._end_request, number)))
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
            return
        with self._changed:
            task = self._tasks.pop(number)  # shorter if requests were given up
            del self._ended[number]
            if result is not None:
                request_ids = [task.request_id(response) for response in range(*task.span)]
                self._finished.append(Finished(number, request_ids, *result))
            self._changed.notify_all()

    def _begin_request(self) -> None:
        with self._changed:
            self._unstarted -= 1
            if not self._unstarted:
                self._changed.notify_all()

    def _end_request(self, number: int) -> None:
        with self._changed:
            self._requests_left -= 1
            self._ended[number] += 1
            # Only this count can make a waiting `exchange` ready, so its thread is not woken for every request.
            if self._requests_left == self._low - 1:
                self._changed.notify_all()
