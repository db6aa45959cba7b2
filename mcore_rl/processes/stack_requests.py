"""Requests for stack dumps of processes of this host."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Iterable

from mcore_rl.processes.stacks import SIGNAL, address_of, handles_signal
from mcore_rl.processes.tree import descendants_of

SECONDS_TO_ANSWER = 1.0
"""Time limit for a process to write its stacks by itself."""


def request_stacks(pids: Iterable[int]) -> None:
    """Make processes of this host, and their descendants, write their stacks.

    Returns when all have written that can answer, at the latest after SECONDS_TO_ANSWER. The others, in which native
    code keeps the interpreter lock, receive SIGNAL if they handle it (it would end the rest), and may still write.
    """
    asked = [each for pid in pids for each in (pid, *(process.pid for process in descendants_of(pid)))]
    for pid in set(asked) - written_stacks(asked):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if handles_signal(pid):
                os.kill(pid, SIGNAL)


def written_stacks(pids: Iterable[int]) -> set[int]:
    """Ask processes to write their stacks; return the ids of those that have, at the latest after
    SECONDS_TO_ANSWER."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
        # The kernel chooses an abstract address, for the answers.
        own.bind("")
        own.setblocking(False)
        waiting = set()
        for pid in pids:
            # Processes without a thread that answers, or whose queue is full, because they do not run.
            with contextlib.suppress(OSError):
                own.sendto(str(pid).encode(), address_of(pid))
                waiting.add(pid)
        written: set[int] = set()
        deadline = time.monotonic() + SECONDS_TO_ANSWER
        while waiting - written and (left := deadline - time.monotonic()) > 0:
            if select.select([own], [], [], left)[0]:
                written.add(int(own.recv(32)))
        return written
