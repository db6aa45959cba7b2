"""A child process: start it in its own process group, watch it, and kill its process tree."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence

import psutil

from mcore_rl.processes.stacks import remove_child_stacks
from mcore_rl.processes.tree import descendants_of, kill_tree, marked, new_mark

_POLL_SECONDS = 0.02
"""Interval of checks: waitid with WNOWAIT has no timeout."""


class Child:
    """A running command. `kill` also ends everything that it has started.

    Start it in a thread that outlives it: Linux sends the parent-death signal (parent_death) when that thread ends.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        pass_fds: Collection[int] = (),
        stdout: int | None = None,
    ) -> None:
        self._mark = new_mark()
        self._descendants: list[psutil.Process] = []
        self._process = subprocess.Popen(
            command,
            env=marked(environment, self._mark),
            pass_fds=pass_fds,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            # Its own group: one signal reaches all members, and Ctrl-C in the terminal reaches none.
            process_group=0,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code, or the negative number of the signal that ended the process; None while it runs.

        Reading it does not reap the process, so the kernel does not reuse its process and group ids before `kill`.
        """
        if self._process.returncode is not None:
            return self._process.returncode
        try:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # this process ignores SIGCHLD, so the kernel has reaped the child
            return self._process.poll()
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def wait(self, seconds: float) -> int | None:
        """Wait up to `seconds` for the process to end; return `exit_code`."""
        deadline = time.monotonic() + seconds
        while (code := self.exit_code) is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return code

    def note_descendants(self) -> None:
        """Record the current descendants for `kill`: the process may end and leave them behind."""
        self._descendants = descendants_of(self.pid)

    def kill(self) -> int:
        """Kill the process tree; return the exit code of the child."""
        code = kill_tree(self._process, self._mark, self._descendants)
        remove_child_stacks(self.pid)
        return code


def kill_all(children: Collection[Child]) -> None:
    """Kill several children and their trees. All children receive KILL first, so none reports the loss of a peer."""
    for child in children:
        if child.exit_code is None:
            child.note_descendants()
            child._process.kill()
    for child in children:
        child.kill()


def start_module(module: str, environment: Mapping[str, str] | None = None) -> tuple[Child, socket.socket]:
    """Run a module of this project as `python -P -m MODULE DESCRIPTOR PARENT_PID`; return it with a connected socket.

    `served.parent_socket` is the counterpart in the child. The child is a new interpreter: this process has threads, so
    it cannot fork safely, and multiprocessing's spawn would import the main module again.

    environment: variables added to this process's own.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        # -P: without it, -m prepends the working directory to sys.path, where a file could shadow a module.
        command = [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid())]
        # The child finds the same modules as this process.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        # One thread each: several of these processes compute at the same time, on the cores that the engine uses too.
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **(environment or {})}
        try:
            return Child(command, variables, pass_fds=[theirs.fileno()]), ours
        except BaseException:
            ours.close()
            raise
