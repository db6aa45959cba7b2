"""The notes by which supervisors and ranks of all nodes agree: texts under names, in a store that node 0 keeps."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch import distributed as dist

from mcore_rl.errors import ConfigError, McoreRLError


@dataclass(frozen=True)
class Address:
    """Where node 0 keeps the board."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def is_loopback(self) -> bool:
        """Whether all nodes are pretended ones, on this machine."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def listen(address: Address) -> socket.socket:
    """The socket of a board at this address alone; port 0 takes any that is free.

    Raises: ConfigError.
    """
    try:
        resolved = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        family, (host, *_) = resolved[0], resolved[4]
        # Debian lets a machine's name mean 127.0.1.1 on the machine itself, where no other node would reach it.
        if not address.is_loopback() and ipaddress.ip_address(host).is_loopback:
            host = ""
        return socket.create_server((str(host), address.port), family=family)
    except OSError as error:
        raise ConfigError(
            f"node 0 cannot listen on {address} ({error}); choose another with --rendezvous or --port"
        ) from error


class Board:
    """A connection to the board. Every call raises McoreRLError once node 0 has not answered for the timeout."""

    def __init__(self, address: Address, timeout_seconds: float, listener: socket.socket | None = None) -> None:
        """On node 0 `listener` is the socket to keep the board at, from listen()."""
        self.address, self._seconds = address, timeout_seconds
        try:
            self._store = dist.TCPStore(
                address.host,
                address.port,
                is_master=listener is not None,
                timeout=timedelta(seconds=timeout_seconds),
                wait_for_workers=False,
                **({} if listener is None else {"master_listen_fd": listener.detach()}),
            )
        except RuntimeError as error:
            raise self._gone() from error

    def post(self, name: str, note: str) -> None:
        try:
            self._store.set(name, note)
        except RuntimeError as error:
            raise self._gone() from error

    def read(self, name: str) -> str | None:
        """None where it is not there yet."""
        try:
            return self._store.get(name).decode() if self._store.check([name]) else None
        except RuntimeError as error:
            raise self._gone() from error

    def wait(self, name: str, timeout_seconds: float) -> None:
        """Until the note is there.

        Raises: McoreRLError.
        """
        try:
            self._store.wait([name], timedelta(seconds=timeout_seconds))
        except RuntimeError as error:
            raise self._gone() from error

    def join(self, name: str, ranks: Sequence[int], rank: int, *, backend: str, timeout_seconds: float) -> None:
        """Makes these ranks the default process group of torch.

        Collective: all of `ranks`.
        """
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(name, self._store),
            rank=ranks.index(rank),
            world_size=len(ranks),
            timeout=timedelta(seconds=timeout_seconds),
        )

    def _gone(self) -> McoreRLError:
        return McoreRLError(
            f"node 0 of the fabric test does not answer at {self.address} (waited {self._seconds:g} s): start the test "
            "on every node, with an address of node 0 that all of them reach"
        )
