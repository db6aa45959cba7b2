"""Requests for stack dumps of processes of this host."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from mcore_rl.processes.stacks import SIGNAL, handles_signal
from mcore_rl.processes.tree import descendants_of


def request_stacks(pids: Iterable[int]) -> None:
    """Make processes of this host, and their descendants, write their stacks; return before they have written.

    Only processes that handle the signal receive it: it would end the others.
    """
    for pid in pids:
        for each in (pid, *(process.pid for process in descendants_of(pid))):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if handles_signal(each):
                    os.kill(each, SIGNAL)
