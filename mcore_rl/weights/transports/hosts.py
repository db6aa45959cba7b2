"""Host identity (whether two processes share memory), and the removal of files that killed processes left on a host."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SHARED_MEMORY = "/dev/shm"
_OWNED = re.compile(r"mcore_rl_(?:tmp_)?(\d+)_")
"""Start of the names of files and directories that belong to the process with this id."""


@dataclass(frozen=True)
class Host:
    """Host of a process. `memory` is equal for two processes exactly when they mount the same /dev/shm.

    Two Ray nodes on one machine share it; two containers on one machine may not.
    """

    name: str
    memory: tuple[str, int]


def this_host() -> Host:
    """Return the host of the calling process."""
    return Host(socket.gethostname(), (BOOT_ID.read_text().strip(), os.stat(SHARED_MEMORY).st_dev))


def remove_abandoned(directory: Path) -> list[str]:
    """Remove files and directories in `directory` whose owners were killed before they could do it. Returns their
    names. Owners hold a lock (flock) on them. Directories of other users stay."""
    removed = []
    for path in directory.glob("mcore_rl_*"):
        owner = _OWNED.match(path.name)
        if owner is None or Path(f"/proc/{owner[1]}").exists():
            continue
        with contextlib.suppress(OSError):
            # Not blocking: opening a named pipe that another user made here would wait for its writer.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                status = os.fstat(descriptor)
                is_directory = stat.S_ISDIR(status.st_mode)
                if is_directory and status.st_uid != os.getuid():
                    continue
                # The owner may live in another pid namespace: only a free lock proves that it is dead.
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True) if is_directory else path.unlink()
                removed.append(path.name)
            finally:
                os.close(descriptor)
    return removed
