"""Ports for servers that start a while after their port was chosen."""

from __future__ import annotations

import random
import socket
from pathlib import Path

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
CANDIDATES = 10_000


def free_port() -> int:
    """A port that was free a moment ago, below those that the kernel gives to outgoing connections: on a busy host one
    of these would be taken again before its server listens.

    Raises: OSError when all candidates are taken.
    """
    first = int(EPHEMERAL.read_text().split()[0])
    for port in random.SystemRandom().sample(range(max(first - CANDIDATES, 1024), first), 100):
        with socket.socket() as listener:
            try:
                listener.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError("none of 100 ports below the ephemeral range is free")
