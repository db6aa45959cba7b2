"""Ends a child process with everything that it has started, sessions of its own and daemons included.

Descendants are found by their parents. A daemon whose parent has ended belongs to another parent, so every child is
started with a mark in its environment, which all that it starts inherits.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping

import psutil

VARIABLE = "MCORE_RL_PROCESS_TREES"
"""Environment variable with the marks of all trees that a process belongs to."""
TERM_SECONDS = 1.0
"""Between TERM and KILL for descendants: the launcher of a sandbox ends its programs and removes its directory."""
KILL_SECONDS = 5.0
_POLL_SECONDS = 0.02


def new_mark() -> str:
    """A mark that no other tree has."""
    return f"{os.getpid()}-{secrets.token_hex(8)}"


def marked(environment: Mapping[str, str], mark: str) -> dict[str, str]:
    """The environment of a tree's first process."""
    return {**environment, VARIABLE: f"{environment.get(VARIABLE, '')}:{mark}"}


def kill_tree(process: subprocess.Popen[bytes], mark: str, known: Iterable[psutil.Process] = ()) -> int:
    """Ends a child that was started with `marked`, and its descendants; returns its exit code as subprocess does.

    known: descendants that `descendants_of` found earlier, for a child that has ended meanwhile.

    The child gets KILL at once. Descendants that are left get TERM, and KILL after TERM_SECONDS. A process that has
    both left its parents and cleared its environment is not found.
    """
    descendants = [*known, *descendants_of(process.pid)]
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(process.pid) == process.pid:
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    code = process.wait()
    _end(descendants, mark, signal.SIGTERM, TERM_SECONDS)
    _end(descendants, mark, signal.SIGKILL, KILL_SECONDS)
    return code


def _end(known: list[psutil.Process], mark: str, number: signal.Signals, seconds: float) -> None:
    """Sends a signal to what is left, and to what that starts meanwhile, until nothing is left or time is over."""
    deadline = time.monotonic() + seconds
    signalled: set[psutil.Process] = set()
    while left := {*filter(_runs, known), *_marked(mark)}:
        for process in left - signalled:
            known += descendants_of(process.pid)
            with contextlib.suppress(psutil.Error):  # psutil compares the start time, so no other process is hit
                process.send_signal(number)
        signalled |= left
        if time.monotonic() > deadline:
            return
        time.sleep(_POLL_SECONDS)


def descendants_of(pid: int) -> list[psutil.Process]:
    """Living descendants; none if the process has ended."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _marked(mark: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if _has_mark(process, mark)]


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return mark in process.environ().get(VARIABLE, "").split(":")
    except (psutil.Error, OSError):
        return False
