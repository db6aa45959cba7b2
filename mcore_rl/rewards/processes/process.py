"""One grading process as its parent sees it: started without the parent's modules, ended with all its children."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing import Pipe

from mcore_rl.config.reward import RewardConfig


@dataclass(frozen=True)
class Task:
    """A pickled Sample. alone: to be graded in a batch of its own."""

    key: int
    pickled: bytes
    alone: bool = False


class GradingProcess:
    """A worker and what it has been given and not yet answered.

    Started by executing the interpreter anew, not by fork or multiprocessing: the host has threads, and its main
    module may not be importable. Construct it in a thread that lives as long as the worker shall: Linux kills the
    worker when that thread ends, however it ends.
    """

    def __init__(self, config: RewardConfig, start_seconds: float) -> None:
        self.connection, theirs = Pipe()
        with theirs:
            descriptor = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "mcore_rl.rewards.processes.worker", str(descriptor), str(os.getpid())],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                env=_environment(),
                process_group=0,
            )
        self.ready = False
        self.given: deque[Task] = deque()
        self.deadline = time.monotonic() + start_seconds
        # One that ended already is found out when its connection is read.
        with contextlib.suppress(BrokenPipeError):
            self.connection.send(config)

    @property
    def idle(self) -> bool:
        return self.ready and not self.given

    def give(self, tasks: list[Task], answer_seconds: float) -> None:
        """Sends a batch; the first answer is due in `answer_seconds`."""
        self.given.extend(tasks)
        self.deadline = time.monotonic() + answer_seconds
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send([(task.key, task.pickled) for task in tasks])

    def answered(self, count: int, answer_seconds: float) -> None:
        """Notes that the first `count` samples are graded; the next answer is due in `answer_seconds`."""
        for _ in range(count):
            self.given.popleft()
        self.deadline = time.monotonic() + answer_seconds

    def ended(self) -> bool:
        """Whether the process is gone. It stays a zombie, so that its group's number is not given away."""
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def kill(self) -> int:
        """Ends the process and whatever it started; its exit code as subprocess gives it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self.connection.close()
        return self._process.wait()


def _environment() -> dict[str, str]:
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}
