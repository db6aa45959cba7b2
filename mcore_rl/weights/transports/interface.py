"""Protocols of the transports: channels, and the sending and receiving end of weight messages.

Both ends agree on when a slot of a staging buffer may be written: it is filled, read, and filled again `num_slots`
rounds later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from mcore_rl.errors import PeerLostError
from mcore_rl.weights.slices.messages import Message
from mcore_rl.weights.transports.link import Link, MessageTag


class Transfer(Protocol):
    """A send or receive that is in flight, or queued for the next launch."""

    @property
    def memory(self) -> torch.Tensor: ...

    def wait(self) -> None:
        """Block until the transfer is complete.

        Raises: PeerLostError naming a peer that died or did not answer within the timeout; StorageError naming a file.
        """


class Channel(Protocol):
    """Point-to-point transfers of memory on `device`: gloo (Link), files (FileChannel) or NCCL (NcclChannel)."""

    device: torch.device

    def send(self, memory: torch.Tensor, peer: int, tag: MessageTag) -> Transfer: ...

    def receive(self, memory: torch.Tensor, peer: int, tag: MessageTag) -> Transfer: ...

    def launch(self) -> None:
        """Start all queued transfers of a round. Every process launches the rounds in the same order."""


class HostChannel(Channel, Protocol):
    """Channel of host memory, which also carries digests: gloo (Link) or files (FileChannel)."""

    def handshake(self, peers: Collection[int]) -> None:
        """Connect to all peers of this process. Raises: PeerLostError."""

    def fetch(self, buffer: int, senders: Collection[int]) -> None:
        """Begin to copy the next messages of `senders` to staging buffer number `buffer` into this process, if they can
        arrive before they are received."""

    def is_fetched(self) -> bool:
        """Return whether all of these messages have arrived. Raises: as Transfer.wait."""

    def flush(self) -> None:
        """Make everything that was sent available to its receivers. Raises: StorageError."""

    def closing_on_loss(self) -> AbstractContextManager[None]:
        """Close all connections if a peer is lost inside the block."""

    def close(self) -> None: ...


class GpuChannel(Channel, Protocol):
    """Channel between GPUs. It has no connections to close, so its processes end it by an announcement."""

    def handshake(self, targets: Collection[int], sources: Collection[int]) -> None: ...

    def abandon(self, reason: str) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Channels:
    """Channels of a process to all peers: gloo or files for digests and host memory, NCCL for messages between GPUs.

    Weights for the staging buffers in `gpu_buffers` use `gpu`, everything else `host`.
    """

    host: HostChannel
    gpu: GpuChannel | None = None
    gpu_buffers: frozenset[int] = frozenset()
    on_close: list[Callable[[], None]] = field(default_factory=list)
    """Called when the connections end, so that users of mapped staging buffers notice it too."""

    @property
    def all(self) -> list[Channel]:
        return [self.host] if self.gpu is None else [self.host, self.gpu]

    @property
    def link(self) -> Link:
        """Connections between the processes, which files do not have."""
        assert isinstance(self.host, Link)
        return self.host

    def of(self, buffer: int) -> Channel:
        """Return the channel for messages to staging buffer number `buffer`."""
        return self.gpu if self.gpu is not None and buffer in self.gpu_buffers else self.host

    def handshake(self, peers: Collection[int], targets: Collection[int], sources: Collection[int]) -> None:
        """Connect to all peers. `targets`, `sources`: members to which and from which this process sends weights
        between GPUs.

        Collective: all members.
        Raises: PeerLostError.
        """
        with self.closing_on_loss():
            self.host.handshake(peers)
            if self.gpu is not None:
                self.gpu.handshake(targets, sources)

    @contextmanager
    def closing_on_loss(self) -> Iterator[None]:
        """End all connections if a peer is lost inside the block; see Link.closing_on_loss."""
        with self.host.closing_on_loss():
            try:
                yield
            except PeerLostError as error:
                self._leave()
                if self.gpu is not None:
                    self.gpu.abandon(str(error))
                raise

    def close(self) -> None:
        """End all connections. Those between GPUs take memory there. Further calls do nothing."""
        self._leave()
        if self.gpu is not None:
            self.gpu.close()
        self.host.close()

    def _leave(self) -> None:
        for each in self.on_close:
            each()


class ReceivedMessage(NamedTuple):
    """A message and its bytes."""

    message: Message
    memory: torch.Tensor


class MessageSender(Protocol):
    """Sending end of messages, on a trainer rank."""

    def wait_for_slot(self, sync_round: int) -> None:
        """Block until no transfer of an earlier round reads the slots of this round. A transfer of this
        sender may read a slot of another sender.

        Raises: PeerLostError.
        """

    def acquire(self, sync_round: int, message: Message) -> torch.Tensor:
        """Block until the message's memory may be written, and return it.

        Raises: PeerLostError.
        """

    def send(self, sync_round: int, message: Message, memory: torch.Tensor) -> None:
        """Send the message, which the caller has packed into `memory`: the acquired memory, or a part of another
        message's memory of the same round."""

    def flush(self) -> None:
        """Block until all messages are sent.

        Raises: PeerLostError.
        """


class MessageReceiver(Protocol):
    """Receiving end of messages, on an engine rank."""

    def begin(self, first_round: int) -> None:
        """Begin an update whose first round is `first_round`: allow the senders to fill the first slots."""

    def receive(self, sync_round: int) -> list[ReceivedMessage]:
        """Block until all messages of a round have arrived, and return them.

        Raises: PeerLostError; WeightSyncError if a sender wrote another number of bytes than planned.
        """

    def release(self, sync_round: int) -> None:
        """Allow the senders to overwrite the slot of this round, which the caller has read."""

    def close(self) -> None:
        """Release the memory of the messages, which no transfer uses any more. Afterwards this object cannot be used.

        Raises: WeightSyncError if views of memory that other processes share still exist.
        """
