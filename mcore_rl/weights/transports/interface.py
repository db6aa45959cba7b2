"""The two ends of a way by which weights travel, whatever it is made of. Each owns the order of writing and reading: a
slot is filled, read and filled again, `num_slots` turns later."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from mcore_rl.weights.slices.messages import Message


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
