"""How the tasks of a job step find each other: by a file in the directory of this start, which all nodes see."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from mcore_rl.slurm.node_check import node_name
from model_converters.durable_files import durable_write


def is_first() -> bool:
    """Whether this is the first node of the job step, where the others meet."""
    return os.environ["SLURM_NODEID"] == "0"


def address_of(interface: str) -> str:
    """The IPv4 address by which the collectives reach this node, so that others take the same network."""
    import psutil

    entries = psutil.net_if_addrs().get(interface, [])
    addresses = [entry.address for entry in entries if entry.family == socket.AF_INET]
    if not addresses:
        sys.exit(f"{node_name()}: GLOO_SOCKET_IFNAME={interface} has no IPv4 address here; set it in slurm.environment")
    return addresses[0]


def address_here() -> str:
    """The IPv4 address by which other nodes reach this one: of GLOO_SOCKET_IFNAME, else of the default route."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        return address_of(interface)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        try:
            route.connect(("192.0.2.1", 9))  # of no host: only the interface is chosen, nothing is sent
            return str(route.getsockname()[0])
        except OSError:
            return socket.gethostbyname(socket.gethostname())


def wait_for(path: Path, deadline: float, process: subprocess.Popen[bytes] | None = None) -> str | None:
    """What the file holds, once it holds something; None when the process has ended before."""
    while time.monotonic() < deadline:
        if path.exists() and (content := path.read_text(encoding="utf-8").strip()):
            return content
        if process is not None and process.poll() is not None:
            return None
        time.sleep(0.2)
    sys.exit(f"{node_name()}: waited in vain for {path.name}")


def publish(content: str, path: Path) -> None:
    """Write a file that the other nodes wait for, atomically."""
    with durable_write(path) as file:
        file.write(content.encode())
