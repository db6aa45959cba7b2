"""Channel whose messages are files: no process connects to another one."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from mcore_rl.errors import ConfigError, WeightSyncError
from mcore_rl.remote.shared_folder import SharedFolder
from mcore_rl.weights.transports.files.fetch import Fetch
from mcore_rl.weights.transports.files.writer import TransferWriter, Written
from mcore_rl.weights.transports.link import GlooTransfer, Link, MessageKind, MessageTag
from mcore_rl.weights.transports.topology import Topology

SHARED = "shared"
"""File that the driver writes into the folder of each connection before any process connects."""


@dataclass(frozen=True)
class Fetched:
    """Transfer of a message that this process reads."""

    memory: torch.Tensor
    fetch: Fetch
    sender: int
    tag: MessageTag
    exact: bool
    """False if the message may be shorter than `memory`."""

    def wait(self) -> None:
        """Copy the message to the beginning of `memory`. Raises: as Fetch.take; WeightSyncError for another size."""
        content = np.frombuffer(self.fetch.take(self.sender, self.tag), np.uint8)
        place = self.memory.numpy().reshape(-1).view(np.uint8)
        if len(content) > len(place) or (self.exact and len(content) < len(place)):
            raise WeightSyncError(f"{self.tag}: {len(content)} bytes arrived, but {len(place)} were planned")
        place[: len(content)] = content


class FileChannel:
    """HostChannel of member number `member`. `folder`: the connection's. `among_trainers`: connections between trainer
    ranks, for the maxima of divided blocks; None if there are none to exchange.

    Other messages are addressed to staging buffers, not to members: several engine ranks may read one.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        folder: SharedFolder,
        topology: Topology,
        member: int,
        *,
        timeout_seconds: float,
        among_trainers: Link | None = None,
    ) -> None:
        self._folder = folder
        self._among_trainers = among_trainers
        self._num_trainers = len(topology.trainers)
        self._exact = not topology.delta
        self._member = member
        self._name = topology.name
        self._timeout_seconds = timeout_seconds
        self._writer = TransferWriter(folder, member, timeout_seconds)
        self._fetch: Fetch | None = None
        self._num_fetches = 0

    def handshake(self, peers: Collection[int]) -> None:
        """Check that this process sees the folder of the connection, and connect to trainer ranks among the peers.

        Raises: ConfigError if it does not see the folder; StorageError if it cannot be read; PeerLostError.
        """
        if SHARED not in self._folder.names(""):
            raise ConfigError(
                f"weights.directory: {self._name(self._member)} does not see the files of the driver in "
                f"{self._folder.url}; set weights.directory to storage that all hosts share"
            )
        if self._among_trainers is not None:
            self._among_trainers.handshake([peer for peer in peers if peer < self._num_trainers])

    def send(self, memory: torch.Tensor, peer: int, tag: MessageTag) -> Written | GlooTransfer:
        if tag.kind == MessageKind.MAXIMA:
            assert self._among_trainers is not None
            return self._among_trainers.send(memory, peer, tag)
        return self._writer.put(memory, tag)

    def receive(self, memory: torch.Tensor, peer: int, tag: MessageTag) -> Fetched | GlooTransfer:
        if tag.kind == MessageKind.MAXIMA:
            assert self._among_trainers is not None
            return self._among_trainers.receive(memory, peer, tag)
        assert self._fetch is not None, "receive() was called before fetch()"
        return Fetched(memory, self._fetch, peer, tag, self._exact or tag.kind != MessageKind.WEIGHTS)

    def launch(self) -> None:
        """Do nothing: files are written and read from the call of `send` and `fetch` on."""

    def fetch(self, buffer: int, senders: Collection[int]) -> None:
        self._end_fetch()
        self._fetch = Fetch(
            self._folder,
            buffer,
            self._num_fetches,
            senders,
            name=self._name,
            timeout_seconds=self._timeout_seconds,
        )
        self._num_fetches += 1

    def is_fetched(self) -> bool:
        return self._fetch is None or self._fetch.is_done()

    def flush(self) -> None:
        """Make the messages since the last call visible, as one transfer.

        Raises: StorageError naming a file.
        """
        self._writer.finish()

    def closing_on_loss(self) -> AbstractContextManager[None]:
        """Close the connections between trainer ranks. Only the driver ends the waits of readers for this process's
        files."""
        return nullcontext() if self._among_trainers is None else self._among_trainers.closing_on_loss()

    def close(self) -> None:
        self._end_fetch()
        if self._among_trainers is not None:
            self._among_trainers.close()
        self._writer.close()

    def _end_fetch(self) -> None:
        if self._fetch is not None:
            self._fetch.close()
            self._fetch = None
