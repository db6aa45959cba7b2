"""Exit status of processes, including processes on this host that are not children of this process.

Ray's raylet is the parent of the run's processes and does not report how they ended. Linux 6.15 and later reports it to
the owner of a pidfd that was opened before the process was reaped.
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path

# From linux/pidfd.h: struct pidfd_info is mask, cgroupid, 11 ids of 32 bits, exit_code.
_INFO = struct.Struct("=QQ11Ii")
# PIDFD_GET_INFO = _IOWR(0xFF, 11, struct pidfd_info); bit 3 of the mask requests the exit code.
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
_WITH_EXIT = 1 << 3
SECONDS_UNTIL_REAPED = 1.0
"""Time to wait until the parent reaps a process; the status is available afterwards."""


@dataclass
class Exits:
    """Exit status of the followed processes, by the caller's key."""

    _descriptors: dict[int, int] = field(default_factory=dict)
    _oom_kills: int = field(default_factory=lambda: _num_oom_kills())

    def follow(self, key: int, pid: int) -> None:
        """Follow process `pid` of this host; no effect if it has ended or the kernel has no pidfds."""
        self.forget(key)
        try:
            self._descriptors[key] = os.pidfd_open(pid)
        # AttributeError: Python was built without pidfd_open.
        except (OSError, AttributeError):
            return

    def forget(self, key: int) -> None:
        """Stop following a process."""
        if (descriptor := self._descriptors.pop(key, None)) is not None:
            os.close(descriptor)

    def status(self, key: int) -> str | None:
        """Return `killed by SIGKILL` or `exit code 3`; None if it is unknown or the process runs."""
        if (descriptor := self._descriptors.get(key)) is None:
            return None
        deadline = time.monotonic() + SECONDS_UNTIL_REAPED
        while (status := _exit_status(descriptor)) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if status is None:
            return None
        if not os.WIFSIGNALED(status):
            return f"exit code {os.waitstatus_to_exitcode(status)}"
        name = signal_name(os.WTERMSIG(status))
        if os.WTERMSIG(status) == signal.SIGKILL and (kills := _num_oom_kills() - self._oom_kills) > 0:
            return f"killed by {name}; during the run, the kernel killed {kills} processes here for lack of memory"
        return f"killed by {name}"


def exit_text(code: int | None) -> str:
    """Return `exit code 3` or `signal SIGKILL` for a `returncode` of subprocess."""
    if code is None or code >= 0:
        return f"exit code {code}"
    return "signal " + signal_name(-code).removeprefix("signal ")


def signal_name(number: int) -> str:
    """Return `SIGKILL`, or `signal 37` for a signal without a name, such as a real-time signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _exit_status(descriptor: int) -> int | None:
    """Return the status as waitpid does; None before the process is reaped, and on kernels without this call."""
    info = bytearray(_INFO.pack(_WITH_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(descriptor, _GET_INFO, info)
    except OSError:
        return None
    mask, *_, status = _INFO.unpack(info)
    return int(status) if mask & _WITH_EXIT else None


def _num_oom_kills() -> int:
    """Return the number of processes that the kernel has killed since boot because memory ran out."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
