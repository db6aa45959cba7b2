"""Rendezvous of the tasks of a job step, through a file in the shared directory of this start."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from model_converters.durable_files import durable_write


def parse_options(description: str | None, numbers: Mapping[str, str]) -> argparse.Namespace:
    """Parse the command line of a task: --attempt, and integers with their help texts by name."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--attempt", type=Path, required=True, help="directory of this start, shared by all nodes")
    for name, help_text in numbers.items():
        parser.add_argument(f"--{name}", type=int, required=True, help=help_text)
    return parser.parse_args()


def node_name() -> str:
    """Return SLURM's name of this node."""
    return os.environ["SLURMD_NODENAME"]


def put_name(directory: Path) -> None:
    """Create an empty file with the name of this node."""
    (directory / node_name()).touch()


def is_first() -> bool:
    """Return whether this is the first node of the job step."""
    return os.environ["SLURM_NODEID"] == "0"


def address_of(interface: str) -> str:
    """Return this node's IPv4 address on an interface."""
    import psutil

    entries = psutil.net_if_addrs().get(interface, [])
    addresses = [entry.address for entry in entries if entry.family == socket.AF_INET]
    if not addresses:
        sys.exit(f"{node_name()}: GLOO_SOCKET_IFNAME={interface} has no IPv4 address here; set it in slurm.environment")
    return addresses[0]


def address_here() -> str:
    """Return this node's IPv4 address on GLOO_SOCKET_IFNAME, otherwise on the default route."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        return address_of(interface)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        try:
            # An address of TEST-NET-1: connect() on a datagram socket selects the interface and sends nothing.
            route.connect(("192.0.2.1", 9))
            return str(route.getsockname()[0])
        except OSError:
            return socket.gethostbyname(socket.gethostname())


def wait_for(path: Path, deadline: float, process: subprocess.Popen[bytes] | None = None) -> str | None:
    """Wait until the file has content and return it. Returns None if the process ends first."""
    # Polling: network file systems do not report changes by other hosts.
    while time.monotonic() < deadline:
        if path.exists() and (content := path.read_text(encoding="utf-8").strip()):
            return content
        if process is not None and process.poll() is not None:
            return None
        time.sleep(0.2)
    sys.exit(f"{node_name()}: timed out waiting for {path.name}")


def publish(content: str, path: Path) -> None:
    """Write a file that the other nodes wait for, atomically."""
    with durable_write(path) as file:
        file.write(content.encode())
