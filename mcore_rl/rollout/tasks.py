"""Tasks that run beside each other on one engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import Enum

from mcore_rl.rollout.stealing import Tail, share
from mcore_rl.types import RolloutScalars, RolloutTask, TrajectoryBuffers


@dataclass(frozen=True)
class Progress:
    """Is told of each request of a task, but for those that are withdrawn; called from any thread."""

    begun: Callable[[], None]
    ended: Callable[[], None]


UNWATCHED = Progress(lambda: None, lambda: None)
Run = Callable[[RolloutTask, Progress], tuple[TrajectoryBuffers, RolloutScalars] | None]
"""RolloutWorker.run."""
Withdraw = Callable[[Callable[[Collection[str]], Collection[str]]], None]
"""Player.withdraw."""


class Until(Enum):
    """What a caller waits for: that all tasks have ended; that more are asked for, or all have; or that any has."""

    ALL = "all"
    ASKS = "asks"
    ANY = "any"


@dataclass(frozen=True)
class Finished:
    """A task by the number that the driver gave it; `request_ids`: of its responses, but for those that were given
    up."""

    number: int
    request_ids: list[str]
    buffers: TrajectoryBuffers
    scalars: RolloutScalars


@dataclass(frozen=True)
class GivenUp:
    """(number of a task, the response at which it ends now) of those that others do the rest of; and how many requests
    are left here that have not begun."""

    ends: list[tuple[int, int]]
    num_unbegun: int


class TaskRunner:
    """Runs tasks with `run`, each in a thread: `num_threads` of them, and the others after them. It asks for more when
    all requests have begun and fewer than `low` are left. `withdraw` takes requests from the engine."""

    def __init__(self, run: Run, withdraw: Withdraw, *, num_threads: int, low: int) -> None:
        self._run, self._withdraw, self._low = run, withdraw, low
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="task")
        self._changed = threading.Condition()
        self._tasks: dict[int, RolloutTask] = {}
        """Those that run, in the order that they came, with the responses that have not been given up."""
        self._requests_left = self._unbegun = self._requests_ended = 0
        self._finished: list[Finished] = []
        self._error: BaseException | None = None

    def begin(self, tasks: Sequence[tuple[int, RolloutTask]]) -> None:
        """Each under its number; beside those that run."""
        with self._changed:
            for number, task in tasks:
                self._tasks[number] = task
                self._requests_left += task.num_responses
                self._unbegun += task.num_responses
                self._pool.submit(self._do, number, task)

    def exchange(self, tasks: Sequence[tuple[int, RolloutTask]], until: Until) -> tuple[list[Finished], int]:
        """Begins `tasks`, and waits; returns what has finished since the last call, and how many requests are left.

        Raises: what a task raised; what the others did is lost.
        """
        reached = {
            Until.ALL: lambda: not self._tasks,
            Until.ASKS: lambda: not self._tasks or self._asks(),
            Until.ANY: lambda: bool(self._finished),
        }[until]
        with self._changed:
            self.begin(tasks)
            self._changed.wait_for(lambda: self._error or reached())
            if self._error is not None:
                raise self._error
            finished, self._finished = self._finished, []
            return finished, self._requests_left

    @property
    def num_left(self) -> tuple[int, int]:
        """Of tasks, and of requests, that have not ended."""
        with self._changed:
            return len(self._tasks), self._requests_left

    @property
    def requests_ended(self) -> int:
        """Since the beginning, whether or not their tasks have."""
        with self._changed:
            return self._requests_ended

    def give_up(self, free: int) -> GivenUp:
        """Lets go of requests that have not begun, of the ends of tasks, for an engine that could begin `free` of them
        at once (stealing.share)."""
        ends: list[tuple[int, int]] = []

        def choose(unbegun: Collection[str]) -> list[str]:
            with self._changed:
                chosen = share([self._tail(number, task, unbegun) for number, task in self._tasks.items()], free)
                request_ids = []
                for tail in chosen:
                    task = self._tasks[tail.task]
                    request_ids += [task.request_id(response) for response in range(tail.first, tail.last)]
                    self._tasks[tail.task] = replace(task, responses=(task.span[0], tail.first))
                ends.extend((tail.task, tail.first) for tail in chosen)
                self._requests_left -= len(request_ids)
                self._unbegun -= len(request_ids)
                self._changed.notify_all()
            return request_ids

        self._withdraw(choose)
        with self._changed:
            return GivenUp(ends, self._unbegun)

    def _tail(self, number: int, task: RolloutTask, unbegun: Collection[str]) -> Tail:
        first, last = task.span
        begin = last
        while begin > first and task.request_id(begin - 1) in unbegun:
            begin -= 1
        return Tail(number, begin, last, task.samples_per_prompt)

    def _do(self, number: int, task: RolloutTask) -> None:
        try:
            made = self._run(task, Progress(self._begin_request, self._end_request))
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
            return
        with self._changed:
            task = self._tasks.pop(number)  # without what was given up
            if made is not None:
                request_ids = [task.request_id(response) for response in range(*task.span)]
                self._finished.append(Finished(number, request_ids, *made))
            self._changed.notify_all()

    def _asks(self) -> bool:
        return not self._unbegun and self._requests_left < self._low

    def _begin_request(self) -> None:
        with self._changed:
            self._unbegun -= 1
            if not self._unbegun:
                self._changed.notify_all()

    def _end_request(self) -> None:
        with self._changed:
            self._requests_left -= 1
            self._requests_ended += 1
            if self._requests_left == self._low - 1:
                self._changed.notify_all()
