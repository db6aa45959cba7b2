"""Host identity: whether two processes share memory."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SHARED_MEMORY = "/dev/shm"


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
