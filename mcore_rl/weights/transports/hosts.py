"""Which processes share memory."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class Host:
    """`memory` is the same for two processes exactly when they see one /dev/shm: two Ray nodes of one machine do, two
    containers on it may not."""

    name: str
    memory: tuple[str, int]


def this_host() -> Host:
    """The host of the calling process."""
    return Host(socket.gethostname(), (BOOT_ID.read_text().strip(), os.stat(SHARED_MEMORY).st_dev))
