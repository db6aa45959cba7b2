"""Assignment of tasks to grading processes, and detection of the task that makes a process hang or die.

An idle process receives a batch of tasks and a deadline for its next answer. A process that calls async functions
receives as many tasks as it may run concurrently, each with its own deadline. A process that misses a deadline, uses
too much memory or dies is replaced, and its unanswered tasks are graded again, one at a time. A task that ends a
process while it runs alone gets failed scores.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait

from mcore_rl.config.reward import RewardConfig
from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.errors import ConfigError, WorkerDiedError
from mcore_rl.processes.child import start_module
from mcore_rl.processes.exits import exit_text
from mcore_rl.processes.tree import MIB, resident_bytes
from mcore_rl.rewards.processes.limited_grader import GradingTask
from mcore_rl.rewards.processes.worker import FLUSH_SECONDS
from mcore_rl.rewards.results import failed
from mcore_rl.types import Score

MAX_BATCH = 64
"""Maximum number of tasks in a message."""
GRACE_SECONDS = 1.0
"""Extra time after reward.timeout_seconds for a grader to react to the interrupt in its own process."""
START_SECONDS = 300.0
"""Time limit for the start of a process, which imports the user's file and its libraries."""
MAX_FAILED_STARTS = 3
DEATH_CHECK_SECONDS = 0.5
MEMORY_CHECK_SECONDS = 0.1


class GradingProcess:
    """A worker process and its unanswered tasks. Construct it in a thread that outlives it (child.Child).

    max_calls: number of tasks that it grades concurrently; 0 until it is ready.
    """

    def __init__(self, config: RewardConfig, sandbox: SandboxConfig) -> None:
        self.child, socket = start_module("mcore_rl.rewards.processes.worker")
        self.connection = Connection(socket.detach())
        self.max_calls = 0
        self.given: dict[int, GradingTask] = {}
        self._due: dict[int, float] = {}
        self._start_due = time.monotonic() + START_SECONDS
        self._answer_seconds = config.timeout_seconds + FLUSH_SECONDS + GRACE_SECONDS
        self._send((config, sandbox))

    @property
    def ready(self) -> bool:
        return self.max_calls > 0

    @property
    def idle(self) -> bool:
        return self.ready and not self.given

    @property
    def deadline(self) -> float:
        """Time at which the next answer is due, infinite if the process is idle; before it is ready, the end of its
        start-up time."""
        return min(self._due.values(), default=math.inf) if self.ready else self._start_due

    def room(self) -> int:
        """Return how many tasks it accepts now: a batch if it has none, or the number of free concurrent calls."""
        if not self.ready or any(task.alone for task in self.given.values()):
            return 0
        if self.max_calls > 1:
            return self.max_calls - len(self.given)
        return 0 if self.given else MAX_BATCH

    def give(self, tasks: list[GradingTask]) -> None:
        """Send tasks, and set the time at which the first answer of a batch, or every concurrent call, is due."""
        self.given |= {task.number: task for task in tasks}
        self._due |= dict.fromkeys((task.number for task in tasks), time.monotonic() + self._answer_seconds)
        self._send(tasks)

    def answered(self, number: int) -> GradingTask:
        """Remove a graded task, and set the time at which the next answer of a batch is due."""
        del self._due[number]
        if self.max_calls == 1:
            self._due = dict.fromkeys(self._due, time.monotonic() + self._answer_seconds)
        return self.given.pop(number)

    def kill(self) -> int:
        """Kill the process tree; return the exit code."""
        # First, because the process may exit when the connection closes, and leave descendants without a parent.
        code = self.child.kill()
        self.connection.close()
        return code

    def _send(self, message: object) -> None:
        # The next read of the connection detects a process that has ended.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(message)


@dataclass
class Dispatcher:
    """The grading processes of a pool. One thread calls all methods and must outlive the processes.

    Raises (from step): ConfigError when a process cannot load the configured function, WorkerDiedError when
    MAX_FAILED_STARTS processes in a row end before they are ready.
    """

    config: RewardConfig
    sandbox: SandboxConfig
    queue: deque[GradingTask]
    on_scores: Callable[[list[tuple[int, Score]]], None]
    _workers: list[GradingProcess] = field(default_factory=list, init=False)
    _failed_starts: int = field(default=0, init=False)
    _memory_check_due: float = field(default=0.0, init=False)

    @property
    def num_ready(self) -> int:
        return sum(worker.ready for worker in self._workers)

    def step(self, wake: int) -> bool:
        """Start missing processes, send queued tasks, and wait for an answer, a death, a deadline or file descriptor
        `wake`; return whether `wake` is readable."""
        while len(self._workers) < self.config.workers:
            self._workers.append(GradingProcess(self.config, self.sandbox))
        for worker in self._workers:
            if self.queue and (batch := self._next_batch(worker)):
                worker.give(batch)
        by_connection = {worker.connection: worker for worker in self._workers}
        readable = wait([wake, *by_connection], self._wait_seconds())
        for connection in readable:
            if connection in by_connection:
                self._receive(by_connection[connection])
        for worker in list(self._workers):
            self._check_alive(worker)
        if self.config.memory_mib is not None and time.monotonic() >= self._memory_check_due:
            self._check_memory(self.config.memory_mib)
            self._memory_check_due = time.monotonic() + MEMORY_CHECK_SECONDS
        return wake in readable

    def kill_all(self) -> None:
        while self._workers:
            self._workers.pop().kill()

    def _next_batch(self, worker: GradingProcess) -> list[GradingTask]:
        # Tasks that run alone are at the front of the queue and wait for a process without other tasks.
        if self.queue[0].alone:
            return [self.queue.popleft()] if worker.idle else []
        if worker.max_calls > 1:
            share = math.ceil(len(self.queue) / self.config.workers)
        else:  # large enough to amortise the message, small enough that all processes finish at about the same time
            share = max(1, len(self.queue) // (2 * self.config.workers))
        return [self.queue.popleft() for _ in range(min(worker.room(), share))]

    def _wait_seconds(self) -> float | None:
        due = min(worker.deadline for worker in self._workers)
        if math.isinf(due):
            return None  # all are idle, and the death of an idle process makes its connection readable
        check = DEATH_CHECK_SECONDS if self.config.memory_mib is None else MEMORY_CHECK_SECONDS
        return min(check, max(0.0, due - time.monotonic()))

    def _receive(self, worker: GradingProcess) -> None:
        try:
            message: int | ConfigError | list[tuple[int, list[Score]]] = worker.connection.recv()
        except (EOFError, OSError):
            self._replace(worker, None)
            return
        if isinstance(message, ConfigError):
            raise message
        if isinstance(message, int):
            worker.max_calls = message
            self._failed_starts = 0  # only failures in a row count
        else:
            for number, scores in message:
                task = worker.answered(number)
                self.on_scores(list(zip(task.keys, scores, strict=True)))

    def _check_alive(self, worker: GradingProcess) -> None:
        if worker.idle or worker.connection.poll():
            return  # an unread answer may change the deadline
        # The connection may outlive the process: a child that its grader forked holds the other end.
        if worker.child.exit_code is not None:
            self._replace(worker, None)
        elif time.monotonic() > worker.deadline:
            limit = f"reward.timeout_seconds={self.config.timeout_seconds:g}"
            self._replace(worker, f"the grader did not finish within {limit} and could not be interrupted")

    def _check_memory(self, limit_mib: int) -> None:
        for worker in list(self._workers):
            # An idle process has no task that could be blamed.
            if worker.given and resident_bytes(worker.child.pid) > limit_mib * MIB:
                self._replace(worker, f"the grader used more memory than reward.memory_mib={limit_mib}")

    def _replace(self, worker: GradingProcess, cause: str | None) -> None:
        self._workers.remove(worker)
        code = worker.kill()
        cause = cause or f"the grader's process ended with {exit_text(code)}"
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                raise WorkerDiedError(f"grading processes cannot start: {cause}; see its output above")
        unanswered = list(worker.given.values())
        if len(unanswered) == 1:  # this task ended the process
            self.on_scores([(key, failed(cause)) for key in unanswered[0].keys])
            return
        # Each of several tasks may have ended the process: grade every one alone.
        self.queue.extendleft(replace(task, alone=True) for task in reversed(unanswered))
