"""Stack dumps of all processes of a run: on SIGUSR2 to the driver, and when a process makes no progress."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import FrameType

import ray

from mcore_rl.processes.stack_requests import request_stacks
from mcore_rl.processes.stacks import (
    SIGNAL,
    SUFFIX,
    remove_empty,
    stop_writing_stacks,
    write_stacks_to,
)
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
    """Requests by SIGUSR2 to this process. The driver's own stacks are written at once, also while it is blocked."""

    def __init__(self) -> None:
        self._requested = False

    @contextlib.contextmanager
    def listening(self, logs: Path) -> Iterator[None]:
        """Handle the signal in the block. After it, remove the files of all processes without stacks."""
        before = signal.signal(SIGNAL, self._request)
        write_stacks_to(stacks_file(logs, DRIVER), chain=True)
        try:
            yield
        finally:
            stop_writing_stacks()
            # None: a handler that Python did not install, and cannot restore.
            signal.signal(SIGNAL, signal.SIG_DFL if before is None else before)
            remove_empty(logs)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self._requested = True

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
