"""Weights by way of the network: messages travel packed, from trainer ranks to whoever owns the memory of a window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch

from mcore_rl.weights.slices.messages import Message
from mcore_rl.weights.sync_plan import Arrivals
from mcore_rl.weights.transports.interface import Arrived, Waiting, Wire
from mcore_rl.weights.transports.link import Kind, Topic
from mcore_rl.weights.transports.topology import Topology


class NetworkOutlet:
    """An Outlet to the windows that this trainer rank does not map and reaches by `wire`. `departures`: its messages to
    them, by turn."""

    def __init__(
        self, wire: Wire, topology: Topology, departures: Mapping[int, Sequence[Message]], num_slots: int
    ) -> None:
        self._wire = wire
        self._topology = topology
        self._num_slots = num_slots
        self._offsets: dict[tuple[int, int], int] = {}
        self._under_way: dict[int, list[Waiting]] = {}
        self._opened: dict[int, torch.Tensor] = {}
        self._slot_bytes = 0
        for turn, messages in departures.items():
            used = 0
            for message in messages:
                self._offsets[turn, message.receiver] = used
                used += message.num_bytes
            self._slot_bytes = max(self._slot_bytes, used)

    @cached_property
    def _staging(self) -> torch.Tensor:
        return torch.zeros(self._slot_bytes * self._num_slots, dtype=torch.uint8, device=self._wire.device)

    def begin(self) -> None:
        """Nothing is heard here: a send ends with its receive."""

    def open(self, turn: int, message: Message) -> torch.Tensor:
        self._wait_for([earlier for earlier in self._under_way if earlier <= turn - self._num_slots])
        start = turn % self._num_slots * self._slot_bytes + self._offsets[turn, message.receiver]
        memory = self._staging[start : start + message.num_bytes]
        self._opened[message.receiver] = memory
        return memory

    def send(self, turn: int, message: Message) -> None:
        window = self._topology.windows[message.receiver]
        target = self._topology.member(window.readers[0]) if window.home is None else window.home
        topic = Topic(Kind.WEIGHTS, message.receiver, turn)
        pending = self._wire.send(self._opened.pop(message.receiver), target, topic)
        self._under_way.setdefault(turn, []).append(pending)

    def flush(self) -> None:
        self._wait_for(sorted(self._under_way))

    def _wait_for(self, turns: Sequence[int]) -> None:
        for turn in turns:
            for pending in self._under_way.pop(turn):
                pending.wait()


class NetworkInlet:
    """An Inlet of an engine rank whose memory no trainer rank shares."""

    def __init__(self, wire: Wire, window: int, arrivals: Arrivals, num_turns: int, num_slots: int) -> None:
        self._wire = wire
        self._window = window
        self._arrivals = arrivals
        self._num_turns = num_turns
        self._num_slots = num_slots
        self._coming: dict[int, list[Waiting]] = {}

    @cached_property
    def _slots(self) -> torch.Tensor:
        shape = self._num_slots, self._arrivals.slot_bytes
        return torch.zeros(shape, dtype=torch.uint8, device=self._wire.device)

    def begin(self) -> None:
        for turn in range(self._num_slots):
            self._receive(turn)

    def take(self, turn: int) -> list[Arrived]:
        arrived = []
        for placed, pending in zip(self._arrivals.at(turn), self._coming.pop(turn), strict=True):
            pending.wait()
            arrived.append(Arrived(placed.message, pending.memory))
        return arrived

    def release(self, turn: int) -> None:
        self._receive(turn + self._num_slots)

    def finish(self) -> None:
        """Nothing is said here: a send ends with its receive."""

    def _receive(self, turn: int) -> None:
        if turn >= self._num_turns:
            return
        topic, slot = Topic(Kind.WEIGHTS, self._window, turn), self._slots[turn % self._num_slots]
        self._coming[turn] = [
            self._wire.receive(slot[placed.offset :][: placed.message.num_bytes], placed.message.sender, topic)
            for placed in self._arrivals.at(turn)
        ]
        self._wire.launch()
