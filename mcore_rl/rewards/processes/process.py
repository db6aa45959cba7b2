"""One grading process as its parent sees it: started without the parent's modules, ended with all its children."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import time
from multiprocessing import Pipe

from mcore_rl.config.reward import RewardConfig
from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.processes.tree import kill_tree, marked, new_mark
from mcore_rl.rewards.processes.messages import Task


class GradingProcess:
    """A worker and what it has been given and not yet answered.

    Started by executing the interpreter anew, not by fork or multiprocessing: the host has threads, and its main
    module may not be importable. Construct it in a thread that lives as long as the worker shall: Linux kills the
    worker when that thread ends, however it ends.
    """

    def __init__(self, config: RewardConfig, sandbox: SandboxConfig, start_seconds: float) -> None:
        self.connection, theirs = Pipe()
        self._mark = new_mark()
        with theirs:
            descriptor = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "mcore_rl.rewards.processes.worker", str(descriptor), str(os.getpid())],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                env=marked(_environment(), self._mark),
                process_group=0,
            )
        self.max_calls = 0
        """Tasks that it has under way together; 0: it is not ready."""
        self.given: dict[int, Task] = {}
        self._due: dict[int, float] = {}
        self._start_due = time.monotonic() + start_seconds
        # One that ended already is found out when its connection is read.
        with contextlib.suppress(BrokenPipeError):
            self.connection.send((config, sandbox))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ready(self) -> bool:
        return self.max_calls > 0

    @property
    def idle(self) -> bool:
        return self.ready and not self.given

    @property
    def deadline(self) -> float:
        """When the next answer is due, or the process has to be ready."""
        return min(self._due.values(), default=math.inf) if self.ready else self._start_due

    def room(self, max_batch: int) -> int:
        """How many tasks it takes now: a batch when it has none, or as many calls as it has not under way."""
        if not self.ready or any(task.alone for task in self.given.values()):
            return 0
        if self.max_calls > 1:
            return self.max_calls - len(self.given)
        return 0 if self.given else max_batch

    def give(self, tasks: list[Task], answer_seconds: float) -> None:
        """Sends tasks; the first answer is due in `answer_seconds`, and with concurrent calls each of them is."""
        self.given |= {task.number: task for task in tasks}
        self._due |= dict.fromkeys((task.number for task in tasks), time.monotonic() + answer_seconds)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(tasks)

    def answered(self, number: int, answer_seconds: float) -> Task:
        """Notes that a task is graded; of a batch the next answer is due in `answer_seconds`."""
        del self._due[number]
        if self.max_calls == 1:
            self._due = dict.fromkeys(self._due, time.monotonic() + answer_seconds)
        return self.given.pop(number)

    def ended(self) -> bool:
        """Whether the process is gone. It stays a zombie, so that its group's number is not given away."""
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def kill(self) -> int:
        """Ends the process and whatever it started; its exit code as subprocess gives it."""
        self.connection.close()
        return kill_tree(self._process, self._mark)


def _environment() -> dict[str, str]:
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    # Many of them grade beside each other, and beside the engine, whatever threads that has.
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
