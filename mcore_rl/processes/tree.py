"""Killing of a child process with all its descendants, including daemons and processes in other sessions, and
measurement of their memory.

Descendants are found through their parent ids. A daemon whose parent has ended gets another parent, so every child also
starts with a mark in its environment, which its descendants inherit.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import psutil

Result = TypeVar("Result")
VARIABLE = "MCORE_RL_PROCESS_TREES"
"""Environment variable with the marks of all trees that contain a process."""
TERM_SECONDS = 1.0
"""Time between TERM and KILL for descendants: a sandbox launcher needs it to kill its programs and remove its
directory."""
KILL_SECONDS = 5.0
"""Maximum time to wait for the end of processes after KILL: a process in uninterruptible I/O may never end."""
_POLL_SECONDS = 0.02
"""Interval of checks: most of the processes are not children, so their end cannot be waited for."""


def new_mark() -> str:
    """Return a mark that no other tree has."""
    return f"{os.getpid()}-{secrets.token_hex(8)}"


def marked(environment: Mapping[str, str], mark: str) -> dict[str, str]:
    """Return the environment for the first process of a tree."""
    return {**environment, VARIABLE: f"{environment.get(VARIABLE, '')}:{mark}"}


def kill_tree(process: subprocess.Popen[bytes], mark: str, known: Iterable[psutil.Process] = ()) -> int:
    """Kill a child that was started with `marked`, and its descendants. Returns the `returncode` of the child.

    known: descendants that `descendants_of` found earlier; they can no longer be found if the child has ended since.

    The child and its process group receive KILL immediately, except multiprocessing's resource trackers. Remaining
    descendants receive TERM, then KILL after TERM_SECONDS, or after KILL_SECONDS if only trackers remain. A process
    that has left its parents and cleared its environment is not found.
    """
    descendants = list(known)
    if process.returncode is None:  # else it was reaped, and another process may have its id
        descendants += descendants_of(process.pid)
        _kill_group(process.pid, descendants)
        process.kill()
    code = process.wait()
    _end(descendants, mark, signal.SIGTERM, TERM_SECONDS)
    _end(descendants, mark, signal.SIGKILL, KILL_SECONDS)
    return code


def _kill_group(group: int, descendants: list[psutil.Process]) -> None:
    """Kill the child's process group, if it leads one.

    Resource trackers stay: they remove shared memory and semaphores once all their users have ended, ignore TERM, and
    end by themselves.
    """
    with contextlib.suppress(ProcessLookupError):
        if os.getpgid(group) != group:
            return
        if not any(map(_is_resource_tracker, descendants)):
            os.killpg(group, signal.SIGKILL)
            return
    for process in descendants:
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if os.getpgid(process.pid) == group and not _is_resource_tracker(process):
                process.kill()


def _is_resource_tracker(process: psutil.Process) -> bool:
    words: list[str] = _unless_gone(process.cmdline, [])
    return any("multiprocessing.resource_tracker" in word for word in words)


def _end(known: list[psutil.Process], mark: str, number: signal.Signals, seconds: float) -> None:
    """Signal the remaining processes and their new descendants until none is left or time is up."""
    start = time.monotonic()
    signalled: set[psutil.Process] = set()
    while left := {*filter(_runs, known), *_marked(mark)}:
        for process in left - signalled:
            known += descendants_of(process.pid)
            with contextlib.suppress(psutil.Error):  # psutil compares the start time, so no other process is hit
                process.send_signal(number)
        signalled |= left
        waited = time.monotonic() - start
        # Resource trackers end by themselves, but on a busy machine they may need more than TERM_SECONDS.
        if waited > KILL_SECONDS or (waited > seconds and not all(map(_is_resource_tracker, left))):
            return
        time.sleep(_POLL_SECONDS)


def descendants_of(pid: int) -> list[psutil.Process]:
    """Return the running descendants; empty if the process has ended."""
    return _unless_gone(lambda: psutil.Process(pid).children(recursive=True), [])


def _runs(process: psutil.Process) -> bool:
    return _unless_gone(lambda: process.is_running() and process.status() != psutil.STATUS_ZOMBIE, False)


def _marked(mark: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if _has_mark(process, mark)]


def _has_mark(process: psutil.Process, mark: str) -> bool:
    return _unless_gone(lambda: mark in process.environ().get(VARIABLE, "").split(":"), False)


def _unless_gone(read: Callable[[], Result], otherwise: Result) -> Result:
    """Return a fact about a process; `otherwise` if it has ended or may not be read."""
    try:
        return read()
    except (psutil.Error, OSError):
        return otherwise


MIB = 2**20
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process and its descendants; 0 if it has ended, or without /proc."""
    total, pending = 0, [pid]
    while pending:
        directory = Path(f"/proc/{pending.pop()}")
        try:
            total += int((directory / "statm").read_text().split()[1]) * _PAGE_BYTES
            for thread in (directory / "task").iterdir():  # Linux lists children by the thread that started them
                pending += map(int, (thread / "children").read_text().split())
        # The process or thread has ended between two reads.
        except (OSError, IndexError):
            continue
    return total
