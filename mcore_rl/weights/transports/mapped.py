"""Weights by way of memory that both sides map: writers put their messages straight into the window of the readers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.slices.messages import Message
from mcore_rl.weights.sync_plan import Arrivals, Placed
from mcore_rl.weights.transports.interface import Arrived, Waiting, Wire
from mcore_rl.weights.transports.link import Ears, Kind, Link, Topic
from mcore_rl.weights.transports.topology import Topology, Window


@dataclass(frozen=True, eq=False)
class MappedWindow:
    """Window `number` in this process: `num_slots` slots, one behind the other."""

    number: int
    topology: Topology
    arrivals: Arrivals
    memory: torch.Tensor
    num_slots: int

    @property
    def window(self) -> Window:
        return self.topology.windows[self.number]

    @property
    def readers(self) -> list[int]:
        """By their numbers in the transfer group."""
        return [self.topology.member(reader) for reader in self.window.readers]

    @property
    def home(self) -> list[int]:
        return [] if self.window.home is None else [self.window.home]

    def words(self, peers: Sequence[int], kind: Kind, turn: int) -> list[tuple[int, Topic]]:
        """To whom, and about what."""
        return [(peer, Topic(kind, self.number, turn)) for peer in peers]

    def settle(self) -> None:
        """Waits until what this process has queued on a window's GPU is done: others are told so next."""
        if self.memory.is_cuda:
            torch.cuda.current_stream().synchronize()

    def bytes_of(self, turn: int, placed: Placed) -> torch.Tensor:
        start = turn % self.num_slots * self.arrivals.slot_bytes + placed.offset
        return self.memory[start : start + placed.message.num_bytes]

    def direct(self, turn: int) -> list[Placed]:
        """Messages of those who map the window."""
        return [placed for placed in self.arrivals.at(turn) if placed.message.sender in self.window.writers]

    def relayed(self, turn: int) -> list[Placed]:
        """Messages that come by way of the home."""
        return [placed for placed in self.arrivals.at(turn) if placed.message.sender not in self.window.writers]


class MappedOutlet:
    """An Outlet into a window that this trainer rank, number `rank`, maps."""

    def __init__(self, link: Link, mapped: MappedWindow, rank: int) -> None:
        self._link = link
        self._mapped = mapped
        self._placed = {
            turn: each for turn in mapped.arrivals.turns for each in mapped.direct(turn) if each.message.sender == rank
        }
        free = {turn: mapped.words(mapped.readers, Kind.FREE, turn) for turn in self._placed}
        self._free = Ears(link, free, mapped.num_slots)

    def begin(self) -> None:
        self._free.begin()

    def open(self, turn: int, message: Message) -> torch.Tensor:
        self._free.hear(turn)
        return self._mapped.bytes_of(turn, self._placed[turn])

    def send(self, turn: int, message: Message) -> None:
        self._mapped.settle()
        for reader, topic in self._mapped.words(self._mapped.readers, Kind.READY, turn):
            self._link.tell(message.num_bytes, reader, topic)

    def flush(self) -> None:
        self._link.flush()


class Relay:
    """What a window's home does for trainer ranks that do not map it: it receives their messages into the window."""

    def __init__(self, link: Link, wire: Wire, mapped: MappedWindow) -> None:
        """`wire`: by which they send."""
        self._link = link
        self._wire = wire
        self._mapped = mapped
        self._coming: dict[int, list[tuple[Waiting, torch.Tensor]]] = {}
        turns = [turn for turn in mapped.arrivals.turns if mapped.relayed(turn)]
        free = {turn: mapped.words(mapped.readers, Kind.FREE_TO_RELAY, turn) for turn in turns}
        self._free = Ears(link, free, mapped.num_slots)

    def begin(self) -> None:
        self._free.begin()

    def open(self, turn: int) -> None:
        """Begins to receive, once the slot is free.

        Raises: PeerLostError.
        """
        self._free.hear(turn)
        topic = Topic(Kind.WEIGHTS, self._mapped.number, turn)
        for placed in self._mapped.relayed(turn):
            target = self._mapped.bytes_of(turn, placed)
            direct = target.device.type == self._wire.device.type
            memory = target if direct else torch.empty(target.shape, dtype=torch.uint8, pin_memory=True)
            pending = self._wire.receive(memory, placed.message.sender, topic)
            self._coming.setdefault(turn, []).append((pending, target))

    def close(self, turn: int) -> None:
        """Waits for what was to come, and says so.

        Raises: PeerLostError.
        """
        coming = self._coming.pop(turn, [])
        for pending, target in coming:
            pending.wait()
            if pending.memory is not target:
                target.copy_(pending.memory)
        if coming:
            self._mapped.settle()
            num_bytes = sum(target.numel() for _, target in coming)
            for reader, topic in self._mapped.words(self._mapped.readers, Kind.RELAYED, turn):
                self._link.tell(num_bytes, reader, topic)


class MappedInlet:
    """An Inlet from a window that this engine rank maps."""

    def __init__(self, link: Link, mapped: MappedWindow) -> None:
        self._link = link
        self._mapped = mapped
        self._written = Ears(link, {turn: self._from_writers(turn) for turn in mapped.arrivals.turns}, mapped.num_slots)

    def begin(self) -> None:
        self._written.begin()
        for turn in range(self._mapped.num_slots):
            self._free(turn)

    def take(self, turn: int) -> list[Arrived]:
        mapped = self._mapped
        planned = [placed.message.num_bytes for placed in mapped.direct(turn)]
        if mapped.relayed(turn):
            planned.append(sum(placed.message.num_bytes for placed in mapped.relayed(turn)))
        for said, num_bytes, (writer, _) in zip(
            self._written.hear(turn), planned, self._from_writers(turn), strict=True
        ):
            if said != num_bytes:
                name = mapped.topology.name(writer)
                raise WeightSyncError(f"turn {turn}: {name} wrote {said} bytes where {num_bytes} are planned")
        return [Arrived(placed.message, mapped.bytes_of(turn, placed)) for placed in mapped.arrivals.at(turn)]

    def release(self, turn: int) -> None:
        self._mapped.settle()
        self._free(turn + self._mapped.num_slots)

    def finish(self) -> None:
        self._link.flush()

    def _from_writers(self, turn: int) -> list[tuple[int, Topic]]:
        return self._words(turn, Kind.READY, Kind.RELAYED)

    def _free(self, turn: int) -> None:
        """Whoever writes at this turn may do so."""
        for writer, topic in self._words(turn, Kind.FREE, Kind.FREE_TO_RELAY):
            self._link.tell(turn, writer, topic)

    def _words(self, turn: int, direct: Kind, relayed: Kind) -> list[tuple[int, Topic]]:
        """To or from each who writes at this turn, and the home where it relays."""
        mapped = self._mapped
        words = mapped.words([placed.message.sender for placed in mapped.direct(turn)], direct, turn)
        return words + (mapped.words(mapped.home, relayed, turn) if mapped.relayed(turn) else [])
