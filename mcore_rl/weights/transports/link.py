"""What the processes of a weight sync say to each other: a group of their own beside those of trainer and engine.

Point to point over gloo, in host memory. A send ends only once its receive was posted: nobody is overrun. Pairs
that will have anything to say connect first (`greet`).
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


class Kind(enum.IntEnum):
    """Of messages: each has a tag of its own per turn."""

    WEIGHTS = 0
    READY = 1
    """What I have written into the window is there."""
    RELAYED = 2
    """What others have sent to me is in the window."""
    FREE = 3
    """The slot may be written."""
    FREE_TO_RELAY = 4
    DIGESTS = 5
    GREETING = 6
    NOTHING = 7
    """Is never sent."""


class Topic(NamedTuple):
    """What a message is about: the two sides of one name it alike, and no other under way does."""

    kind: Kind
    window: int
    turn: int

    @property
    def tag(self) -> int:
        return (self.turn * MOST_WINDOWS + self.window) * len(Kind) + self.kind


MOST_WINDOWS = 1 << 14
MOST_TURNS = (1 << 31) // (MOST_WINDOWS * len(Kind))
"""Of a sync: a tag is a positive number of 32 bits."""


@dataclass(frozen=True)
class Meeting:
    """Where the members of a group meet: a store, which outlives them, and a name in it that no other group has had: a
    second group of a name would find the addresses of the first."""

    host: str
    port: int
    generation: int


def open_store(address: str) -> dist.TCPStore:
    """For members to meet at. It listens at that very address, at a port of its own: torch (2.13) would listen on every
    network of the host, and a store takes orders from whoever connects."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    port = listener.getsockname()[1]
    return dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


@dataclass(frozen=True)
class Pending:
    """A message under way."""

    work: dist.Work
    memory: torch.Tensor
    """Kept until it is through."""
    lost: AbstractContextManager[None]

    def wait(self) -> None:
        """Raises: PeerLostError naming the peer that is gone, or silent for the group's time."""
        with self.lost:
            self.work.wait()


@dataclass(frozen=True)
class Lost(AbstractContextManager[None]):
    """gloo's errors become those of a peer."""

    peer: str

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            # Without the line in gloo's sources, and its advice.
            said = re.sub(r"^[[]\S+[]] ", "", str(error).splitlines()[0]).partition(". This is")[0]
            raise PeerLostError(f"{self.peer}: {said}") from None


class Link:
    """This process's end, and a Wire. `name` says who a member is."""

    device = torch.device("cpu")

    def __init__(self, group: dist.ProcessGroupGloo, member: int, name: Callable[[int], str]) -> None:
        self._group = group
        self._member = member
        self._name = name
        self._sent: list[Pending] = []
        self._peers: list[int] = []
        # The end of a group that has lost a member may wait for ever for a thread of gloo's (torch 2.13), which then
        # has nothing to do but the dead connection: a group stays until its process ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    @classmethod
    def connect(
        cls,
        meeting: Meeting,
        member: int,
        num_members: int,
        address: str,
        *,
        timeout_seconds: float,
        name: Callable[[int], str],
    ) -> Link:
        """Collective over all members. `address` is this process's own.

        Raises: PeerLostError when not all come.
        """
        timeout = timedelta(seconds=timeout_seconds)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address, lazy_init=True)]
        options._timeout, options._threads = timeout, 2
        try:
            store = dist.TCPStore(meeting.host, meeting.port, is_master=False, timeout=timeout)
            prefixed = dist.PrefixStore(f"weights/{meeting.generation}", store)
            return cls(dist.ProcessGroupGloo(prefixed, member, num_members, options), member, name)
        except RuntimeError as error:
            where = f"{meeting.host}:{meeting.port}"
            raise PeerLostError(f"the {num_members} processes of a sync did not meet at {where}: {error}") from None

    def greet(self, peers: Collection[int]) -> None:
        """Connects to all with whom there will be anything to say; each of them greets this process.

        Raises: PeerLostError.
        """
        self._peers = sorted(peers)
        # gloo connects a pair when both want to, and waits: all go through the pairs in one order, so that none waits
        # for another in a ring.
        for peer in sorted(peers, key=lambda peer: (min(peer, self._member), max(peer, self._member))):
            topic = Topic(Kind.GREETING, 0, 0)
            coming = self.receive(torch.zeros(1, dtype=torch.int64), peer, topic)
            self.tell(self._member, peer, topic)
            coming.wait()
        self.flush()

    def send(self, memory: torch.Tensor, peer: int, topic: Topic) -> Pending:
        with self._lost(peer):
            return Pending(self._group.send([memory], peer, topic.tag), memory, self._lost(peer))

    def receive(self, memory: torch.Tensor, peer: int, topic: Topic) -> Pending:
        with self._lost(peer):
            return Pending(self._group.recv([memory], peer, topic.tag), memory, self._lost(peer))

    def launch(self) -> None:
        """Messages go when they are sent."""

    def tell(self, number: int, peer: int, topic: Topic) -> None:
        """Sends a number, and goes on."""
        self._sent.append(self.send(torch.tensor([number]), peer, topic))

    def _lost(self, peer: int) -> AbstractContextManager[None]:
        return Lost(self._name(peer))

    @contextmanager
    def leaving_if_lost(self) -> Iterator[None]:
        """Where a peer is lost inside, those who wait for this process learn at once that it is lost to them too, and
        not after the group's time. Nothing can be said afterwards."""
        try:
            yield
        except PeerLostError:
            self._leave()
            raise

    def _leave(self) -> None:
        """gloo closes all connections of a group where a wait ends without its message, and on no other demand."""
        for peer in self._peers:
            try:
                nothing = self._group.recv([torch.zeros(1)], peer, Topic(Kind.NOTHING, 0, 0).tag)
                nothing.wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if "Timed out" in str(error):
                    return  # the others' connections were gone already

    def flush(self) -> None:
        """Waits until all that was told has been heard.

        Raises: PeerLostError.
        """
        sent, self._sent = self._sent, []
        for pending in sent:
            pending.wait()


class Ears:
    """Numbers that peers will tell: `words[turn]` are who and what about. Each is listened for `ahead` turns before its
    own, since a word to one who listens goes one way, and any other three."""

    def __init__(self, link: Link, words: Mapping[int, Sequence[tuple[int, Topic]]], ahead: int) -> None:
        self._link = link
        self._words = words
        self._ahead = ahead
        self._turns: Iterator[int] = iter(())
        self._open: dict[int, list[Pending]] = {}

    def begin(self) -> None:
        """Listens for the first words of an update."""
        self._turns = iter(sorted(self._words))
        for turn in islice(self._turns, self._ahead + 1):
            self._listen(turn)

    def hear(self, turn: int) -> list[int]:
        """Waits for the words of a turn.

        Raises: PeerLostError.
        """
        pending = self._open.pop(turn, [])
        for each in pending:
            each.wait()
        following = next(self._turns, None) if pending else None
        if following is not None:
            self._listen(following)
        return [int(each.memory) for each in pending]

    def _listen(self, turn: int) -> None:
        self._open[turn] = [
            self._link.receive(torch.zeros(1, dtype=torch.int64), peer, topic) for peer, topic in self._words[turn]
        ]
