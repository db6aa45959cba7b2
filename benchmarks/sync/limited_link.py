"""Two network namespaces, A and B, whose connection has a limited rate. Needs root."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.result import SkippedError

ADDRESSES = {"A": "10.213.9.1", "B": "10.213.9.2"}
_NETWORK = 0x40000000
"""CLONE_NEWNET, the kind of namespace that `enter` changes."""


@contextmanager
def limited_link(rate: str) -> Iterator[dict[str, Path]]:
    """Create the namespaces. Yields their paths by name. `rate`: rate of each direction, such as 1gbit.

    Raises: SkippedError if this machine does not allow it.
    """
    names = {host: f"mcore_rl_bench_{os.getpid()}_{host}" for host in ADDRESSES}
    with ExitStack() as stack:
        for name in names.values():
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "del", name)
        _run(
            "ip", "-n", names["A"], "link", "add", "veth0", "type", "veth", "peer", "name", "veth0", "netns", names["B"]
        )
        for host, name in names.items():
            _run("ip", "-n", name, "addr", "add", f"{ADDRESSES[host]}/24", "dev", "veth0")
            for device in ("lo", "veth0"):
                _run("ip", "-n", name, "link", "set", device, "up")
            shape = ("root", "tbf", "rate", rate, "burst", "1mb", "latency", "50ms")
            _run("tc", "-n", name, "qdisc", "add", "dev", "veth0", *shape)
        yield {host: Path("/run/netns") / name for host, name in names.items()}


def enter(namespace: Path) -> None:
    """Move the calling thread, and the threads and processes that it starts, to a network namespace."""
    # torch asks for the name of each peer, and no name server can be reached from here.
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    libc = ctypes.CDLL(None, use_errno=True)
    with namespace.open() as opened:
        if libc.setns(opened.fileno(), _NETWORK):
            raise OSError(ctypes.get_errno(), f"setns: {namespace}")


def _run(*command: str) -> None:
    environment = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    except FileNotFoundError:
        raise SkippedError(f"needs {command[0]}, of the package iproute2") from None
    if done.returncode:
        raise SkippedError(f"needs root and network namespaces: {' '.join(command)}: {done.stderr.strip()}")
