"""Rendezvous store of the supervisors and ranks: a TCPStore on node 0."""

from __future__ import annotations

import ipaddress
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

from torch import distributed as dist

from mcore_rl.errors import ConfigError, McoreRLError

POLL_SECONDS = 0.1
"""Interval of checks: TCPStore.wait raises if one key is late, without telling which arrived."""


class Address(NamedTuple):
    """Address of the store."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def is_loopback(self) -> bool:
        """Return whether all nodes are simulated on this machine."""
        return self.host == "localhost" or _is_loopback(self.host)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(address: Address) -> socket.socket:
    """Open the store's socket on node 0, at this address only; port 0 selects a free port. Raises: ConfigError."""
    try:
        family, *_, (host, *_) = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        # Debian resolves a machine's own name to 127.0.1.1, which no other node can reach.
        if not address.is_loopback() and _is_loopback(str(host)):
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
        **({} if listener is None else {"master_listen_fd": listener.detach()}),
    )


class Exchange:
    """Exchange of notes between the supervisors. Every method raises McoreRLError if node 0 is not reachable."""

    def __init__(
        self, address: Address, node: int, num_nodes: int, timeout_seconds: float, listener: socket.socket | None
    ) -> None:
        self._node, self._nodes = node, range(num_nodes)
        self._unreachable = (
            f"node 0 of the fabric test does not answer at {address} (waited {timeout_seconds:g} s): start "
            "the test on every node, with an address of node 0 that all of them reach"
        )
        with self._node_0_errors():
            self._store = connect(address, timeout_seconds, listener)

    def gather(self, name: str, note: str, timeout_seconds: float) -> list[str | None]:
        """Gather a note from every node; None for a node that missed node 0's deadline.

        Node 0 collects the notes and publishes the list, so the result is the same on every node.
        """
        with self._node_0_errors():
            self._store.set(f"{name} {self._node}", note)
            if self._node == 0:
                self._store.set(name, json.dumps(self._collect(name, timeout_seconds)))
            # Node 0 can start to collect as late as the deadline of its own ranks.
            self._store.wait([name], timedelta(seconds=3 * timeout_seconds))
            notes: list[str | None] = json.loads(self._store.get(name))
            return notes

    def close(self, timeout_seconds: float) -> None:
        """Report the end to node 0, which keeps the store until all nodes are done."""
        with self._node_0_errors():
            self._store.set(f"done {self._node}", "")
            if self._node == 0:
                self._collect("done", timeout_seconds)

    def _collect(self, name: str, timeout_seconds: float) -> list[str | None]:
        keys = [f"{name} {node}" for node in self._nodes]
        deadline = time.monotonic() + timeout_seconds
        while not self._store.check(keys) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return [self._store.get(key).decode() if self._store.check([key]) else None for key in keys]

    @contextmanager
    def _node_0_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # torch's errors of stores and networks
            raise McoreRLError(self._unreachable) from error
