"""Transfer group of a weight sync: point-to-point messages over gloo, in host memory.

The group is separate from the process groups of trainer and engine. Its members are all trainer ranks, then all engine
ranks. It carries control messages (one int64 each), digests, and weights that no shared memory or NCCL carries.

A gloo send completes only after its receive was posted, so no receiver is overrun. Pairs of members that exchange
messages connect before the first update (`handshake`).

Messages of round r of one staging buffer, whose slots are reused every `num_slots` rounds:

    reader -> writer    FREE(r)            the reader has read round r - num_slots
    writer -> reader    READY(r)           the writer's messages are in the slot
    reader -> owner     FREE_TO_RELAY(r)   as FREE, for messages of trainer ranks that do not map the buffer
    sender -> owner     WEIGHTS(r)         such a message; the owner receives it into the slot
    owner  -> reader    RELAYED(r)         all relayed messages are in the slot

Without a shared buffer only WEIGHTS(r) is sent, from each sender to the reader. See transports/mapped_buffers.py and
transports/network.py.
"""

from __future__ import annotations

import ctypes
import enum
import re
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import NamedTuple

import torch
import torch.distributed as dist

from mcore_rl.errors import PeerLostError


class MessageKind(enum.IntEnum):
    """Kind of a message. Kinds have different tags, so messages of one round can overtake each other."""

    WEIGHTS = 0
    READY = 1
    """A writer has written its messages into the staging buffer. Value: their bytes."""
    RELAYED = 2
    """The owner has written the messages that it relays into the staging buffer. Value: their bytes."""
    FREE = 3
    """The slot may be written."""
    FREE_TO_RELAY = 4
    """The slot may be written by the relay. Distinct from FREE because the owner may also be a writer."""
    DIGESTS = 5
    HANDSHAKE = 6
    UNUSED = 7
    """Never sent. `Link` waits for it in order to close its connections."""


class MessageTag(NamedTuple):
    """Identifies a message. Sender and receiver use the same tag; no two messages in flight between them share one."""

    kind: MessageKind
    buffer: int
    sync_round: int

    @property
    def value(self) -> int:
        return (self.sync_round * MAX_BUFFERS + self.buffer) * len(MessageKind) + self.kind


# The 31 bits of a tag: 14 for the buffer, 3 for the kind, 14 for the round.
MAX_BUFFERS = 1 << 14
MAX_ROUNDS = (1 << 31) // (MAX_BUFFERS * len(MessageKind))
"""Maximum rounds per sync: a gloo tag is a non-negative 32-bit integer."""


@dataclass(frozen=True)
class Rendezvous:
    """Address of the store at which the members of a transfer group connect.

    `generation` must be new for every group: with the prefix of an earlier group the members would find its addresses.
    """

    host: str
    port: int
    generation: int


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

    def wait(self) -> None:
        """Block until the transfer is complete.

        Raises: PeerLostError naming a peer that died or did not answer within the timeout.
        """
        with self.on_error:
            self.work.wait()


@dataclass(frozen=True)
class PeerLostOnError(AbstractContextManager[None]):
    """Converts a RuntimeError of gloo or NCCL into a PeerLostError that names the peer."""

    peer: str

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            # Drop gloo's source location ("[file:line] ") and its generic advice ("This is ...").
            reason = re.sub(r"^[[]\S+[]] ", "", str(error).splitlines()[0]).partition(". This is")[0]
            raise PeerLostError(f"{self.peer}: {reason}") from None


class Link:
    """This process's end of the transfer group, and a Channel. `name` returns the name of a member for messages."""

    device = torch.device("cpu")

    def __init__(self, group: dist.ProcessGroupGloo, member: int, name: Callable[[int], str]) -> None:
        self._group = group
        self._member = member
        self._name = name
        self._sent: list[GlooTransfer] = []
        """Control messages that are not known to be delivered."""
        self._peers: list[int] = []
        # Never destroy the group: after the loss of a member the destructor can block forever on a gloo thread that
        # waits for the dead connection (torch 2.13). Other than memory the extra reference costs nothing.
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
            store = dist.TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=timeout)
            prefixed = dist.PrefixStore(f"weights/{rendezvous.generation}", store)
            return cls(dist.ProcessGroupGloo(prefixed, member, num_members, options), member, name)
        except RuntimeError as error:
            where = f"{rendezvous.host}:{rendezvous.port}"
            raise PeerLostError(
                f"the {num_members} processes of a weight sync did not connect at {where}: {error}"
            ) from None

    def handshake(self, peers: Collection[int]) -> None:
        """Connect to all peers of this process. Each of them calls `handshake` with this process among its peers.

        Raises: PeerLostError.
        """
        self._peers = sorted(peers)
        # A lazy gloo pair connects when both sides use it, and blocks until then. All members go through their pairs
        # in one global order, so that no ring of members waits for each other.
        for peer in sorted(peers, key=lambda peer: (min(peer, self._member), max(peer, self._member))):
            tag = MessageTag(MessageKind.HANDSHAKE, 0, 0)
            pending = self.receive(torch.zeros(1, dtype=torch.int64), peer, tag)
            self.send_control(self._member, peer, tag)
            pending.wait()
        self.flush()

    def send(self, memory: torch.Tensor, peer: int, tag: MessageTag) -> GlooTransfer:
        with self._on_error(peer):
            return GlooTransfer(self._group.send([memory], peer, tag.value), memory, self._on_error(peer))

    def receive(self, memory: torch.Tensor, peer: int, tag: MessageTag) -> GlooTransfer:
        with self._on_error(peer):
            return GlooTransfer(self._group.recv([memory], peer, tag.value), memory, self._on_error(peer))

    def launch(self) -> None:
        """Do nothing: transfers start when `send` or `receive` is called."""

    def send_control(self, number: int, peer: int, tag: MessageTag) -> None:
        """Send a control message without waiting for its delivery; `flush` waits."""
        self._sent.append(self.send(torch.tensor([number]), peer, tag))

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
            self._close()
            raise

    def _close(self) -> None:
        # gloo has no call to close a group's connections. It closes all of them when a wait times out, so wait 1 ms
        # for a message that is never sent.
        for peer in self._peers:
            try:
                never_sent = self._group.recv([torch.zeros(1)], peer, MessageTag(MessageKind.UNUSED, 0, 0).value)
                never_sent.wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if "Timed out" in str(error):
                    return
                # Any other error: the connection to this peer is closed already, so try the next one.

    def flush(self) -> None:
        """Block until all control messages are delivered.

        Raises: PeerLostError.
        """
        sent, self._sent = self._sent, []
        for pending in sent:
            pending.wait()


class PostedReceives:
    """Pre-posted receives for control messages. messages[sync_round]: peer and tag of each expected message.

    Receives are posted up to `ahead` rounds before their message is due. If the receive is posted first, gloo sends
    one message; otherwise three (the sender's notification, the receiver's answer, and the message itself).
    """

    def __init__(self, link: Link, messages: Mapping[int, Sequence[tuple[int, MessageTag]]], ahead: int) -> None:
        self._link = link
        self._messages = messages
        self._ahead = ahead
        self._unposted: Iterator[int] = iter(())
        """Rounds of this update whose receives are not posted yet."""
        self._posted: dict[int, list[GlooTransfer]] = {}

    def begin(self) -> None:
        """Post the receives for the first rounds of an update."""
        self._unposted = iter(sorted(self._messages))
        for sync_round in islice(self._unposted, self._ahead + 1):
            self._post(sync_round)

    def wait(self, sync_round: int) -> list[int]:
        """Block until all messages of a round have arrived. Returns their values.

        Raises: PeerLostError.
        """
        pending = self._posted.pop(sync_round, [])
        for each in pending:
            each.wait()
        following = next(self._unposted, None) if pending else None
        if following is not None:
            self._post(following)
        return [int(each.memory) for each in pending]

    def _post(self, sync_round: int) -> None:
        self._posted[sync_round] = [
            self._link.receive(torch.zeros(1, dtype=torch.int64), peer, tag) for peer, tag in self._messages[sync_round]
        ]
