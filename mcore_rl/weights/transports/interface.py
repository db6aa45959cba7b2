"""The two ends of a way by which weights travel, whatever it is made of. Each owns the order of writing and reading: a
slot is filled, read and filled again, `num_slots` turns later."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from mcore_rl.weights.slices.messages import Message
from mcore_rl.weights.transports.link import Topic


class Waiting(Protocol):
    """A message under way, or about to be."""

    @property
    def memory(self) -> torch.Tensor: ...

    def wait(self) -> None:
        """Until it is through. Raises: PeerLostError naming the peer that is gone, or silent for the group's time."""


class Wire(Protocol):
    """Carries packed messages point to point, in memory of `device`: over gloo (Link), or NCCL."""

    device: torch.device

    def send(self, memory: torch.Tensor, peer: int, topic: Topic) -> Waiting: ...

    def receive(self, memory: torch.Tensor, peer: int, topic: Topic) -> Waiting: ...

    def launch(self) -> None:
        """All that this process sends and receives in a turn has been asked for: it goes now, if it has not yet. Every
        process launches turns in their order."""


class Arrived(NamedTuple):
    """A message, and the bytes that came."""

    message: Message
    memory: torch.Tensor


class Outlet(Protocol):
    """A trainer rank's end."""

    def begin(self) -> None:
        """Before an update."""

    def open(self, turn: int, message: Message) -> torch.Tensor:
        """The bytes into which the message is to be packed, once they are free.

        Raises: PeerLostError.
        """

    def send(self, turn: int, message: Message) -> None:
        """Lets go of what was packed."""

    def flush(self) -> None:
        """Waits until everything has left. Raises: PeerLostError."""


class Inlet(Protocol):
    """An engine rank's end."""

    def begin(self) -> None:
        """Lets senders fill the first slots."""

    def take(self, turn: int) -> list[Arrived]:
        """Waits for everything of a turn.

        Raises: PeerLostError; WeightSyncError for other bytes than planned.
        """

    def release(self, turn: int) -> None:
        """What came at this turn has been read; its slot is filled again."""

    def finish(self) -> None:
        """Waits until what this end has said was heard. Raises: PeerLostError."""
