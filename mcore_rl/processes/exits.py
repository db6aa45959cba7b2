"""Exit status of processes on this host that are not children of this process.

Ray's raylet is the parent of the run's processes and does not pass on how they ended. Linux 6.15 and later gives it to
any owner of a pidfd that was opened before the process was reaped.
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
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
_WITH_EXIT = 1 << 3
SECONDS_UNTIL_REAPED = 1.0
"""The status is there once the parent has waited for the process."""


@dataclass
class Exits:
    """Exit status of the processes that are followed, by the caller's key."""

    _descriptors: dict[int, int] = field(default_factory=dict)
    _oom_kills: int = field(default_factory=lambda: _num_oom_kills())

    def follow(self, key: int, pid: int) -> None:
        """Note how the process `pid` of this host ends; nothing if it is gone already or the kernel has no pidfds."""
        self.forget(key)
        try:
            self._descriptors[key] = os.pidfd_open(pid)
        except (OSError, AttributeError):
            return

    def forget(self, key: int) -> None:
        """Follow this process no longer."""
        if (descriptor := self._descriptors.pop(key, None)) is not None:
            os.close(descriptor)

    def status(self, key: int) -> str | None:
        """`killed by SIGKILL` or `exit code 3`; None if it is unknown or the process runs."""
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
            return f"killed by {name}; the kernel has killed {kills} processes of this host since, as memory ran out"
        return f"killed by {name}"


def signal_name(number: int) -> str:
    """`SIGKILL`; the number of a signal without a name, such as a real-time signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _exit_status(descriptor: int) -> int | None:
    """The status as of waitpid; None before the process was reaped, and on kernels without it."""
    info = bytearray(_INFO.pack(_WITH_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(descriptor, _GET_INFO, info)
    except OSError:
        return None
    mask, *_, status = _INFO.unpack(info)
    return int(status) if mask & _WITH_EXIT else None


def _num_oom_kills() -> int:
    """Processes that the kernel of this host has killed since it booted because memory ran out."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
