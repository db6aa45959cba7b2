"""Stack dumps of all processes of a run: on SIGUSR2 to the driver, and when a process makes no progress."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import FrameType

import ray

from mcore_rl.processes.stack_requests import request_stacks
from mcore_rl.processes.stacks import SIGNAL, SUFFIX, VARIABLE, open_stacks, remove_empty
from mcore_rl.runtime.calls import ProcessHandle
from mcore_rl.runtime.output import stacks_file
from mcore_rl.runtime.roles.base import RunProcess
from mcore_rl.weights.transports.hosts import Host, this_host

SECONDS_FOR_STACKS = 2.0
"""Time limit for processes on other hosts to forward the request."""
SECONDS_TO_WRITE = 0.5
"""Time that processes get to write their stacks before they may be killed."""
DRIVER = "driver"


def files_of(logs: str | Path) -> str:
    """Return the pattern of the files with stacks, for messages."""
    return f"{logs}/*{SUFFIX}"


class StackRequests:
    """Requests by SIGUSR2 to this process, whose own stacks are written by a handler of Python.

    The main thread runs it between two of its steps, and in waits that signals interrupt, while no other thread runs
    Python. Other processes are asked by their driver, which must run for that anyway; processes/stacks.py has the
    reason why they do not handle the signal themselves.
    """

    def __init__(self) -> None:
        self._requested, self._file = False, -1

    @contextlib.contextmanager
    def listening(self, logs: Path) -> Iterator[None]:
        """Handle the signal in the block. After it, remove the files of all processes without stacks."""
        self._file = open_stacks(stacks_file(logs, DRIVER))
        before = signal.signal(SIGNAL, self._request)
        try:
            yield
        finally:
            # None: a handler that Python did not install, and cannot restore.
            signal.signal(SIGNAL, signal.SIG_DFL if before is None else before)
            os.close(self._file)
            os.environ.pop(VARIABLE, None)
            remove_empty(logs)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self._requested = True
        faulthandler.dump_traceback(self._file, all_threads=True)

    def take(self) -> bool:
        """Return whether there was a request since the last call."""
        requested, self._requested = self._requested, False
        return requested


def dump_stacks(
    members: Mapping[Host, Mapping[ProcessHandle[RunProcess], int]], silent: Collection[ProcessHandle[RunProcess]]
) -> bool:
    """Make all processes write their stacks, and wait until they have probably done so. Return whether there are any.

    members: process ids of the processes of each host.
    silent: processes that may not answer a call.
    """
    calls = []
    for host, pids in members.items():
        if host == this_host():
            request_stacks(pids.values())
        else:
            # A process that answers signals all processes of its host: others may hang in native code.
            helper = min(pids, key=lambda process: process in silent)
            calls.append(helper.call(RunProcess.request_stacks, list(pids.values())))
    if calls:
        ray.wait(calls, num_returns=len(calls), timeout=SECONDS_FOR_STACKS)
    if members:
        time.sleep(SECONDS_TO_WRITE)
    return bool(members)
