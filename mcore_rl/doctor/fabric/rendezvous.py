"""Place of this node in the fabric test, and the store on node 0 that all nodes use.

The place comes from --rendezvous or from the variables of a SLURM job step; without both, the node is tested alone.
"""

from __future__ import annotations

import argparse
import ipaddress
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from typing import NamedTuple

from torch import distributed as dist

from mcore_rl.errors import ConfigError

DEFAULT_PORT = 29400
"""Port of the store on the first node, the default of torchrun's rendezvous."""


class Address(NamedTuple):
    """Address of the store."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class NodePlace:
    """Index of this node and the address of the store.

    host: name of this node.
    listener: the store's socket, on node 0 only.
    hosts: names of all nodes, if known in advance.
    """

    index: int
    num_nodes: int
    host: str
    address: Address
    listener: socket.socket | None = None
    hosts: tuple[str, ...] = ()


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach the address. All nodes of the test are then simulated on it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(address: Address) -> socket.socket:
    """Open the store's socket on node 0, bound to `address` if other nodes can reach it; port 0 selects a free port.

    Raises: ConfigError.
    """
    try:
        family, *_, (host, *_) = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        # Debian resolves a machine's own name to 127.0.1.1, which no other node can reach: bind to all addresses.
        if not is_loopback(address.host) and is_loopback(str(host)):
            host = ""
        return socket.create_server((str(host), address.port), family=family)
    except OSError as error:
        raise ConfigError(
            f"node 0 cannot listen on {address} ({error}); choose another with --rendezvous or --port"
        ) from error


def connect(address: Address, timeout_seconds: float, listener: socket.socket | None = None) -> dist.TCPStore:
    """Connect to the store; with a listener, start the store on it."""
    return dist.TCPStore(
        *address,
        is_master=listener is not None,
        timeout=timedelta(seconds=timeout_seconds),
        wait_for_workers=False,
        # The socket was opened in advance, so that a free port is known before the other nodes start.
        **({} if listener is None else {"master_listen_fd": listener.detach()}),
    )


def place_of(options: argparse.Namespace, environment: Mapping[str, str]) -> NodePlace:
    """Return this node's place from the command's options or SLURM's variables; otherwise the node is alone.

    Raises: ConfigError.
    """
    host = environment.get("SLURMD_NODENAME") or socket.gethostname()
    if options.rendezvous is not None:
        return _place_at_rendezvous(options, host)
    for name in ("nodes", "node_rank"):
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} belongs to --rendezvous HOST:PORT: set it too")
    hosts = expand_hosts(environment.get("SLURM_STEP_NODELIST", ""))
    if hosts and int(environment.get("SLURM_STEP_NUM_TASKS", len(hosts))) != len(hosts):
        raise ConfigError("the fabric test needs one task per node: srun --ntasks-per-node=1 mcore-rl doctor --node")
    if options.port is not None and not hosts:
        raise ConfigError("--port is for a SLURM job step: start the test with srun, or set --rendezvous HOST:PORT")
    if len(hosts) < 2:  # also in a batch script, outside of any step
        return open_place(0, 1, host, Address("127.0.0.1", 0))
    address = Address(hosts[0], DEFAULT_PORT if options.port is None else options.port)
    return open_place(int(environment["SLURM_NODEID"]), len(hosts), host, address, tuple(hosts))


def open_place(index: int, num_nodes: int, host: str, address: Address, hosts: tuple[str, ...] = ()) -> NodePlace:
    """Return a node's place; node 0 opens the store's socket, on a free port if the port is 0. Raises: ConfigError."""
    listener = listen(address) if index == 0 else None
    if listener is not None and address.port == 0:
        address = Address(address.host, listener.getsockname()[1])
    return NodePlace(index, num_nodes, host, address, listener, hosts)


def _place_at_rendezvous(options: argparse.Namespace, host: str) -> NodePlace:
    if options.nodes is None or options.node_rank is None:
        raise ConfigError("--rendezvous needs --nodes N and --node-rank I")
    if options.port is not None:
        raise ConfigError("--port is for a SLURM job step: --rendezvous HOST:PORT already contains the port")
    if not 0 <= options.node_rank < options.nodes:
        raise ConfigError(f"--node-rank={options.node_rank} must be one of 0 to {options.nodes - 1} (--nodes)")
    name, _, port = options.rendezvous.rpartition(":")
    if not name or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"--rendezvous={options.rendezvous} must look like HOST:PORT")
    return open_place(options.node_rank, options.nodes, host, Address(name.strip("[]"), int(port)))


def expand_hosts(text: str) -> list[str]:
    """Expand SLURM's list of hosts: n[1-3,07],m2 becomes n1, n2, n3, n07, m2. Containers lack scontrol."""
    hosts: list[str] = []
    for part in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", text):
        # Literal text and the contents of brackets alternate.
        pieces = re.split(r"\[([^\]]*)\]", part)
        choices = [_numbers(piece) if index % 2 else [piece] for index, piece in enumerate(pieces)]
        hosts += map("".join, product(*choices))
    return hosts


def _numbers(text: str) -> list[str]:
    numbers = []
    for span in text.split(","):
        first, _, last = span.partition("-")
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return numbers
