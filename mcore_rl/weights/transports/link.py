"""Transfer group of a weight sync: point-to-point messages over gloo, in host memory.

The group is separate from the process groups of trainer and engine. Its members are all trainer ranks, then all engine
ranks. It carries digests, and weights that no shared memory or NCCL carries. With files, the trainer ranks are its only
members, if they quantise weights in FP8, and exchange MAXIMA.

A gloo send completes only after its receive was posted, so no receiver is overrun. Pairs of members that exchange
messages connect before the first update (`handshake`).

Round r of a staging buffer that its reader shares with no trainer rank is one message WEIGHTS(r) from each sender to
the reader (transports/network.py). If trainer ranks map the buffer, its owner receives such messages into the slot, and
its users exchange signals (transports/mapped_buffers.py).
"""

from __future__ import annotations

import ctypes
import enum
import re
import socket
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from mcore_rl.errors import PeerLostError
from mcore_rl.weights.transports.arrival import Rendezvous, await_members


class MessageKind(enum.IntEnum):
    """Kind of a message. Kinds have different tags, so messages of one round can overtake each other."""

    WEIGHTS = 0
    DIGESTS = 1
    HANDSHAKE = 2
    UNUSED = 3
    """Never sent. `Link` waits for it in order to close its connections."""
    MAXIMA = 4
    """Largest magnitudes of divided blocks (block_maxima.py). The number of the group takes the place of the buffer."""


class MessageTag(NamedTuple):
    """Identifies a message. Sender and receiver use the same tag; no two messages in flight between them share one."""

    kind: MessageKind
    buffer: int
    sync_round: int

    @property
    def value(self) -> int:
        return (self.sync_round * MAX_BUFFERS + self.buffer) * len(MessageKind) + self.kind


# The 31 bits of a tag: 14 for the buffer, the others for the 5 kinds and the round.
MAX_BUFFERS = 1 << 14
MAX_ROUNDS = (1 << 31) // (MAX_BUFFERS * len(MessageKind))
"""Maximum rounds per sync: a gloo tag is a non-negative 32-bit integer."""


def open_store(address: str) -> dist.TCPStore:
    """Start a store that listens only at `address`, on a free port.

    torch (2.13) would listen on all interfaces, and a TCPStore accepts commands from any client.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    port = listener.getsockname()[1]
    return dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


@dataclass(frozen=True)
class GlooTransfer:
    """A send or receive in flight."""

    work: dist.Work
    memory: torch.Tensor
    """Kept alive until the transfer is complete."""
    on_error: AbstractContextManager[None]
    unfinished: dict[int, GlooTransfer]
    """Contains this transfer, by its id(), until it is complete."""

    def wait(self) -> None:
        """Block until the transfer is complete.

        Raises: PeerLostError naming a peer that died or did not answer within the timeout.
        """
        with self.on_error:
            self.work.wait()
        self.unfinished.pop(id(self), None)


@dataclass(frozen=True)
class PeerLostOnError(AbstractContextManager[None]):
    """Converts a RuntimeError of gloo or NCCL into a PeerLostError that names the peer."""

    peer: str

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            # Drop gloo's source location ("[file:line] ") and its generic advice ("This is ...").
            reason = re.sub(r"^\[\S+\] ", "", str(error).splitlines()[0]).partition(". This is")[0]
            raise PeerLostError(f"{self.peer}: {reason}") from None


class Link:
    """This process's end of the transfer group, and a Channel. `name` returns the name of a member for messages."""

    device = torch.device("cpu")

    def __init__(self, group: dist.ProcessGroupGloo, member: int, name: Callable[[int], str]) -> None:
        self._group = group
        self._member = member
        self._name = name
        self._peers: list[int] = []
        """Peers to which this process is connected."""
        # If a receive is dropped before its message arrives, the thread of gloo (torch 2.13) polls the connection
        # without a pause from then on, because nobody reads the message.
        self._unfinished: dict[int, GlooTransfer] = {}
        # Never destroy the group: after the loss of a member the destructor can block forever on a gloo thread that
        # waits for the dead connection (torch 2.13). Each group leaves 6 file descriptors and 3 idle threads behind.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    @classmethod
    def connect(
        cls,
        rendezvous: Rendezvous,
        member: int,
        num_members: int,
        address: str,
        *,
        timeout_seconds: float,
        name: Callable[[int], str],
    ) -> Link:
        """Join the transfer group as number `member`. `address`: at which the others reach this process.

        Collective: all members.
        Raises: PeerLostError if a member is missing.
        """
        timeout = timedelta(seconds=timeout_seconds)
        options = dist.ProcessGroupGloo._Options()
        # lazy_init: pairs connect at their first message. Connecting all pairs would cost members squared.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address, lazy_init=True)]
        options._timeout, options._threads = timeout, 2
        try:
            store = rendezvous.open(timeout_seconds)
            await_members(store, member, num_members, timeout_seconds=timeout_seconds, name=name)
            group = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), member, num_members, options)
        except (RuntimeError, PeerLostError) as error:
            where = f"{rendezvous.host}:{rendezvous.port}"
            raise PeerLostError(
                f"the {num_members} processes of a weight sync did not connect at {where}: {error}"
            ) from None
        return cls(group, member, name)

    def handshake(self, peers: Collection[int]) -> None:
        """Connect to all peers of this process. Each of them calls `handshake` with this process among its peers.

        Raises: PeerLostError.
        """
        # A lazy gloo pair connects when both sides use it, and blocks until then. All members go through their pairs
        # in one global order, so that no ring of members waits for each other.
        for peer in sorted(peers, key=lambda peer: (min(peer, self._member), max(peer, self._member))):
            tag = MessageTag(MessageKind.HANDSHAKE, 0, 0)
            pending = self.receive(torch.zeros(1, dtype=torch.int64), peer, tag)
            sent = self.send(torch.tensor([self._member]), peer, tag)
            pending.wait()
            sent.wait()
            self._peers.append(peer)

    def send(self, memory: torch.Tensor, peer: int, tag: MessageTag) -> GlooTransfer:
        with self._on_error(peer):
            return self._started(self._group.send([memory], peer, tag.value), memory, peer)

    def receive(self, memory: torch.Tensor, peer: int, tag: MessageTag) -> GlooTransfer:
        with self._on_error(peer):
            return self._started(self._group.recv([memory], peer, tag.value), memory, peer)

    def _started(self, work: dist.Work, memory: torch.Tensor, peer: int) -> GlooTransfer:
        transfer = GlooTransfer(work, memory, self._on_error(peer), self._unfinished)
        self._unfinished[id(transfer)] = transfer
        return transfer

    def launch(self) -> None:
        """Do nothing: transfers start when `send` or `receive` is called."""

    def fetch(self, buffer: int, senders: Collection[int]) -> None:
        """Do nothing: a sender waits until its message is received."""

    def is_fetched(self) -> bool:
        return True

    def flush(self) -> None:
        """Do nothing: a transfer is complete after its wait."""

    def _on_error(self, peer: int) -> AbstractContextManager[None]:
        return PeerLostOnError(self._name(peer))

    @contextmanager
    def closing_on_loss(self) -> Iterator[None]:
        """Close all connections if a peer is lost inside the block. The link cannot be used afterwards.

        Peers that wait for this process then fail at once instead of after the timeout.
        """
        try:
            yield
        except PeerLostError:
            self.close()
            raise

    def close(self) -> None:
        """Close all connections of this process. Further calls do nothing."""
        # gloo has no call to close a group's connections. It closes all of them when a wait times out, so wait 1 ms
        # for a message that is never sent.
        peers, self._peers = self._peers, []
        for peer in peers:
            try:
                never_sent = self._group.recv([torch.zeros(1)], peer, MessageTag(MessageKind.UNUSED, 0, 0).value)
                never_sent.wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if "Timed out" in str(error):
                    break
                # Any other error: the connection to this peer is closed already, so try the next one.
        self._unfinished.clear()
