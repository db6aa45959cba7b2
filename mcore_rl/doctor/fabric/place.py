"""Place of this node in the test: alone, given by --rendezvous, or derived from a SLURM job step."""

from __future__ import annotations

import argparse
import re
import socket
from collections.abc import Mapping

from mcore_rl.doctor.fabric.store import Address, listen
from mcore_rl.doctor.fabric.supervisor import Place
from mcore_rl.errors import ConfigError

DEFAULT_PORT = 29400
"""Port of the store on the first node, the default of torchrun's rendezvous."""


def place_of(options: argparse.Namespace, environment: Mapping[str, str]) -> Place:
    """Return this node's place from the command's options or SLURM's variables; otherwise the node is alone.

    Raises: ConfigError.
    """
    host = environment.get("SLURMD_NODENAME") or socket.gethostname()
    if options.rendezvous is not None:
        return _place_at_rendezvous(options, host)
    for name in ("nodes", "node_rank"):
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} belongs to --rendezvous HOST:PORT: set it too")
    if "SLURM_STEP_NODELIST" in environment:
        return _place_in_step(options, environment, host)
    if options.port is not None:
        raise ConfigError("--port is for a SLURM job step: start the test with srun, or set --rendezvous HOST:PORT")
    return open_place(0, 1, host, Address("127.0.0.1", 0))


def open_place(index: int, num_nodes: int, host: str, address: Address, hosts: tuple[str, ...] = ()) -> Place:
    """Return a node's place; node 0 opens the store's socket, on a free port if the port is 0. Raises: ConfigError."""
    listener = listen(address) if index == 0 else None
    if listener is not None and address.port == 0:
        address = Address(address.host, listener.getsockname()[1])
    return Place(index, num_nodes, host, address, listener, hosts)


def _place_at_rendezvous(options: argparse.Namespace, host: str) -> Place:
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


def _place_in_step(options: argparse.Namespace, environment: Mapping[str, str], host: str) -> Place:
    hosts = expand_hosts(environment["SLURM_STEP_NODELIST"])
    if int(environment.get("SLURM_STEP_NUM_TASKS", len(hosts))) != len(hosts):
        raise ConfigError("the fabric test needs one task per node: srun --ntasks-per-node=1 mcore-rl doctor --node")
    port = DEFAULT_PORT if options.port is None else options.port
    if not 0 < port < 65536:
        raise ConfigError(f"--port={port} must be one of 1 to 65535")
    if len(hosts) == 1:
        return open_place(0, 1, host, Address("127.0.0.1", 0))
    return open_place(int(environment["SLURM_NODEID"]), len(hosts), host, Address(hosts[0], port), tuple(hosts))


def expand_hosts(text: str) -> list[str]:
    """Expand SLURM's list of hosts: n[1-3,07],m2 becomes n1, n2, n3, n07 and m2. scontrol is absent in containers."""
    return [name for part in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", text) for name in _expand(part)]


def _expand(part: str) -> list[str]:
    brackets = re.search(r"\[([^\]]*)\]", part)
    if brackets is None:
        return [part]
    numbers = []
    for span in brackets[1].split(","):
        first, _, last = span.partition("-")
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    head, tails = part[: brackets.start()], _expand(part[brackets.end() :])
    return [head + number + tail for number in numbers for tail in tails]
