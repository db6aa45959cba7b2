"""Tasks that run beside each other on one engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from mcore_rl.types import RolloutScalars, RolloutTask, TrajectoryBuffers

Ended = Callable[[], None]
"""Called when a request of a task has ended."""
Run = Callable[[RolloutTask, Ended], tuple[TrajectoryBuffers, RolloutScalars]]
"""RolloutWorker.run."""


@dataclass(frozen=True)
class Finished:
    """A task by the number that the driver gave it."""

    number: int
    buffers: TrajectoryBuffers
    scalars: RolloutScalars


class TaskRunner:
    """Runs tasks with `run`, each in a thread: `num_threads` of them, and the others after them. It asks for more when
    fewer than `low` requests are left."""

    def __init__(self, run: Run, *, num_threads: int, low: int) -> None:
        self._run, self._low = run, low
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="task")
        self._changed = threading.Condition()
        self._tasks_left = self._requests_left = 0
        self._finished: list[Finished] = []
        self._error: BaseException | None = None

    def exchange(self, tasks: Sequence[tuple[int, RolloutTask]], *, more: bool) -> tuple[list[Finished], int]:
        """Begins `tasks`; returns what has finished since the last call, and how many requests are left: when all has
        ended or, if there are `more` tasks to be had, as soon as it asks for them.

        Raises: what a task raised; what the others did is lost.
        """
        with self._changed:
            for number, task in tasks:
                self._tasks_left += 1
                self._requests_left += len(task.prompt_rows) * task.samples_per_prompt
                self._pool.submit(self._do, number, task)
            self._changed.wait_for(
                lambda: self._error or not self._tasks_left or (more and self._requests_left < self._low)
            )
            if self._error is not None:
                raise self._error
            finished, self._finished = self._finished, []
            return finished, self._requests_left

    def _do(self, number: int, task: RolloutTask) -> None:
        try:
            buffers, scalars = self._run(task, self._end_request)
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
            return
        with self._changed:
            self._finished.append(Finished(number, buffers, scalars))
            self._tasks_left -= 1
            self._changed.notify_all()

    def _end_request(self) -> None:
        with self._changed:
            self._requests_left -= 1
            if self._requests_left == self._low - 1:
                self._changed.notify_all()
