"""Protocols of the transports: channels, and the sending and receiving end of weight messages.

Both ends agree on when a slot of a staging buffer may be written: it is filled, read, and filled again `num_slots`
rounds later.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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

        Raises: PeerLostError naming a peer that died or did not answer within the timeout.
        """


class Channel(Protocol):
    """Point-to-point transfers of memory on `device`: gloo (Link) or NCCL (NcclChannel)."""

    device: torch.device

    def send(self, memory: torch.Tensor, peer: int, tag: MessageTag) -> Transfer: ...

    def receive(self, memory: torch.Tensor, peer: int, tag: MessageTag) -> Transfer: ...

    def launch(self) -> None:
        """Start all queued transfers of a round. Every process launches the rounds in the same order."""


class GpuChannel(Channel, Protocol):
    """Channel between GPUs. It has no connections to close, so its processes end it by an announcement."""

    def handshake(self, targets: Collection[int], sources: Collection[int]) -> None: ...

    def abandon(self, reason: str) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Channels:
    """Channels of a process to all peers: gloo for control messages and host memory, NCCL for messages between GPUs.

    Weights for the staging buffers in `gpu_buffers` use `gpu`, everything else `link`.
    """

    link: Link
    gpu: GpuChannel | None = None
    gpu_buffers: frozenset[int] = frozenset()

    @property
    def all(self) -> list[Channel]:
        return [self.link] if self.gpu is None else [self.link, self.gpu]

    def of(self, buffer: int) -> Channel:
        """Return the channel for messages to staging buffer number `buffer`."""
        return self.gpu if self.gpu is not None and buffer in self.gpu_buffers else self.link

    def handshake(self, peers: Collection[int], targets: Collection[int], sources: Collection[int]) -> None:
        """Connect to all peers. `targets`, `sources`: members to which and from which this process sends weights
        between GPUs.

        Collective: all members.
        Raises: PeerLostError.
        """
        # The link stays open after a loss: to close it, its pairs must be connected.
        with self._abandoning_on_loss():
            self.link.handshake(peers)
            if self.gpu is not None:
                self.gpu.handshake(targets, sources)

    @contextmanager
    def closing_on_loss(self) -> Iterator[None]:
        """End all connections if a peer is lost inside the block; see Link.closing_on_loss."""
        with self.link.closing_on_loss(), self._abandoning_on_loss():
            yield

    def close(self) -> None:
        """Free the connections between GPUs, which take memory there, before new ones are made."""
        if self.gpu is not None:
            self.gpu.close()

    @contextmanager
    def _abandoning_on_loss(self) -> Iterator[None]:
        try:
            yield
        except PeerLostError as error:
            if self.gpu is not None:
                self.gpu.abandon(str(error))
            raise


class ReceivedMessage(NamedTuple):
    """A message and its bytes."""

    message: Message
    memory: torch.Tensor


class MessageSender(Protocol):
    """Sending end of messages, on a trainer rank."""

    def begin(self) -> None:
        """Prepare for an update."""

    def acquire(self, sync_round: int, message: Message) -> torch.Tensor:
        """Block until the message's memory may be written, and return it.

        Raises: PeerLostError.
        """

    def send(self, sync_round: int, message: Message) -> None:
        """Send the message, which the caller has packed into the acquired memory."""

    def flush(self) -> None:
        """Block until all messages are sent.

        Raises: PeerLostError.
        """


class MessageReceiver(Protocol):
    """Receiving end of messages, on an engine rank."""

    def begin(self) -> None:
        """Allow the senders to fill the first slots."""

    def receive(self, sync_round: int) -> list[ReceivedMessage]:
        """Block until all messages of a round have arrived, and return them.

        Raises: PeerLostError; WeightSyncError if a sender wrote another number of bytes than planned.
        """

    def release(self, sync_round: int) -> None:
        """Allow the senders to overwrite the slot of this round, which the caller has read."""

    def finish(self) -> None:
        """Block until all acknowledgements are delivered.

        Raises: PeerLostError.
        """
