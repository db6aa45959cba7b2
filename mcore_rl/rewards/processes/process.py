"""Parent's view of a grading process: unanswered tasks and their deadlines."""

from __future__ import annotations

import contextlib
import math
import time
from multiprocessing.connection import Connection

from mcore_rl.config.reward import RewardConfig
from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.processes.child import start_module
from mcore_rl.rewards.processes.messages import Task


class GradingProcess:
    """A worker process and its unanswered tasks. Construct it in a thread that outlives it (child.Child).

    max_calls: number of tasks that it grades concurrently; 0 until it is ready.
    """

    def __init__(self, config: RewardConfig, sandbox: SandboxConfig, start_seconds: float) -> None:
        self.child, socket = start_module("mcore_rl.rewards.processes.worker")
        self.connection = Connection(socket.detach())
        self.max_calls = 0
        self.given: dict[int, Task] = {}
        self._due: dict[int, float] = {}
        self._start_due = time.monotonic() + start_seconds
        self._send((config, sandbox))

    @property
    def ready(self) -> bool:
        return self.max_calls > 0

    @property
    def idle(self) -> bool:
        return self.ready and not self.given

    @property
    def deadline(self) -> float:
        """Time at which the next answer is due; before the process is ready, the end of its start-up time."""
        return min(self._due.values(), default=math.inf) if self.ready else self._start_due

    def room(self, max_batch: int) -> int:
        """Return how many tasks it accepts now: a batch if it has none, or the number of free concurrent calls."""
        if not self.ready or any(task.alone for task in self.given.values()):
            return 0
        if self.max_calls > 1:
            return self.max_calls - len(self.given)
        return 0 if self.given else max_batch

    def give(self, tasks: list[Task], answer_seconds: float) -> None:
        """Send tasks. The first answer of a batch is due in `answer_seconds`, and so is every concurrent call."""
        self.given |= {task.number: task for task in tasks}
        self._due |= dict.fromkeys((task.number for task in tasks), time.monotonic() + answer_seconds)
        self._send(tasks)

    def answered(self, number: int, answer_seconds: float) -> Task:
        """Remove a graded task. The next answer of a batch is due in `answer_seconds`."""
        del self._due[number]
        if self.max_calls == 1:
            self._due = dict.fromkeys(self._due, time.monotonic() + answer_seconds)
        return self.given.pop(number)

    def kill(self) -> int:
        """Kill the process tree; return the exit code."""
        self.connection.close()
        return self.child.kill()

    def _send(self, message: object) -> None:
        # The next read of the connection detects a process that has ended.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(message)
