"""Addresses at which processes of several hosts meet: this node's interface and free ports."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

import psutil

from mcore_rl.errors import ConfigError

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
CANDIDATES = 10_000
"""Number of ports below that range from which ports are tried."""
TRIED = 100
"""Number of candidates that are tried, in random order, before the kernel chooses a port."""


def free_port() -> int:
    """Find a port that is free now, if possible below the range that the kernel uses for outgoing connections: on a
    busy host a port of that range may be taken again before its server listens.

    Raises: ConfigError naming this host when none is free.
    """
    end = int(EPHEMERAL.read_text().split()[0])
    below = range(max(end - CANDIDATES, 1024), end)
    # A random order, because processes that start together would all choose the first free port. 0: the kernel chooses.
    for port in [*random.SystemRandom().sample(below, min(TRIED, len(below))), 0]:
        with socket.socket() as listener:
            try:
                listener.bind(("", port))
            except OSError:
                continue
            return int(listener.getsockname()[1])
    raise ConfigError(
        f"{socket.gethostname()}: no port is free for processes to meet at; end processes that hold ports, or enlarge "
        "the range (sysctl net.ipv4.ip_local_port_range)"
    )


def meet_at(address: str) -> None:
    """Make collectives and engines of this process use the interface that has this node's address. Variables that the
    user has set stay."""
    found = [
        name for name, addresses in psutil.net_if_addrs().items() if address in (each.address for each in addresses)
    ]
    if found:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", found[0])
        os.environ.setdefault("NCCL_SOCKET_IFNAME", found[0])
    os.environ.setdefault("VLLM_HOST_IP", address)


def missing_interface() -> str:
    """Return an error message if this host lacks an interface of GLOO_SOCKET_IFNAME; else ""."""
    chosen, interfaces = os.environ.get("GLOO_SOCKET_IFNAME", ""), psutil.net_if_addrs()
    if all(name in interfaces for name in chosen.split(",") if name):
        return ""
    return (
        f"GLOO_SOCKET_IFNAME={chosen}: {socket.gethostname()} has no such interface, only "
        f"{', '.join(sorted(interfaces))}; set it to an interface that every host has, or unset it"
    )
