"""Where processes of several hosts meet: this node's address, its interface, and ports."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

import psutil

from mcore_rl.errors import ConfigError

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
CANDIDATES = 10_000
TRIED = 100


def free_port() -> int:
    """A port that was free a moment ago, if one is below those that the kernel gives to outgoing connections: on a
    busy host one of these would be taken again before its server listens.

    Raises: ConfigError naming this host when none is free.
    """
    end = int(EPHEMERAL.read_text().split()[0])
    below = range(max(end - CANDIDATES, 1024), end)
    for port in [*random.SystemRandom().sample(below, min(TRIED, len(below))), 0]:
        with socket.socket() as listener:
            try:
                listener.bind(("", port))
            except OSError:
                continue
            return int(listener.getsockname()[1])
    raise ConfigError(
        f"{socket.gethostname()}: no port is free for processes to meet at; end what holds them, or give the kernel "
        "more (sysctl net.ipv4.ip_local_port_range)"
    )


def meet_at(address: str) -> None:
    """Collectives and engines of this process meet others at this node's address, by its interface; what the user has
    set stays."""
    found = [
        name for name, addresses in psutil.net_if_addrs().items() if address in (each.address for each in addresses)
    ]
    if found:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", found[0])
        os.environ.setdefault("NCCL_SOCKET_IFNAME", found[0])
    os.environ.setdefault("VLLM_HOST_IP", address)


def missing_interface() -> str:
    """What is wrong with the interface that the user has set, if this host has it not; "" where it has."""
    chosen, interfaces = os.environ.get("GLOO_SOCKET_IFNAME", ""), psutil.net_if_addrs()
    if all(name in interfaces for name in chosen.split(",") if name):
        return ""
    return (
        f"GLOO_SOCKET_IFNAME={chosen}: {socket.gethostname()} has no such interface, but "
        f"{', '.join(sorted(interfaces))}; set it to one that every host has, or leave it out"
    )
