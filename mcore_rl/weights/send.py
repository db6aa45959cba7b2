"""A trainer rank's side of a weight sync: its own parts of the model go to every engine rank that needs them.

No piece is stored anywhere between the parameter and the memory from which it leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import numpy.typing as npt
import torch

from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.slices.messages import Message, Slice, views
from mcore_rl.weights.sync_plan import SyncPlan
from mcore_rl.weights.transports.interface import Outlet
from mcore_rl.weights.transports.link import Kind, Topic
from mcore_rl.weights.transports.mapped import MappedOutlet, MappedWindow, Relay
from mcore_rl.weights.transports.network import NetworkOutlet
from mcore_rl.weights.transports.wires import Wires
from mcore_rl.weights.verify import DIGEST_BYTES, digest

Span = Callable[[str], AbstractContextManager[None]]


def untimed(name: str) -> AbstractContextManager[None]:
    return nullcontext()


class WeightSender:
    """Sends updates. `mapped`: the windows that this rank maps, by number; `wires`: by which the others are reached.

    One object for all updates of a link; after an error a new link is needed, for all.
    """

    def __init__(self, plan: SyncPlan, rank: int, wires: Wires, mapped: Mapping[int, MappedWindow]) -> None:
        self._plan = plan
        self._rank = rank
        self._link = link = wires.link
        self._wires = wires
        self._mapped = mapped
        self._places: dict[int, list[tuple[Slice, torch.Tensor]]] = {}
        self._num_turns = plan.num_turns
        self._departures = {turn: sorted(messages, key=lambda each: each.receiver)
                            for turn, messages in plan.departures(rank).items()}  # fmt: skip
        targets = {message.receiver for messages in self._departures.values() for message in messages}
        self._outlets: dict[int, Outlet] = {
            window: MappedOutlet(link, mapped[window], rank) for window in targets & mapped.keys()
        }
        for wire in wires.all:
            away = {window for window in targets - mapped.keys() if wires.of(window) is wire}
            departures = {turn: [each for each in messages if each.receiver in away]
                          for turn, messages in self._departures.items()}  # fmt: skip
            self._outlets |= dict.fromkeys(away, NetworkOutlet(wire, plan.topology, departures, plan.num_slots))
        homes = sorted(number for number, window in mapped.items() if window.window.home == rank)
        self._relays = [Relay(link, wires.of(number), mapped[number]) for number in homes]

    def greet(self) -> None:
        """Once, before the first update.

        Raises: PeerLostError.
        """
        arrivals = {number: window.arrivals for number, window in self._mapped.items()}
        self._link.greet(self._plan.peers_of_trainer(self._rank, self._departures, arrivals))

    @torch.no_grad()
    def send(self, tensors: Mapping[str, torch.Tensor], span: Span = untimed) -> npt.NDArray[np.int64]:
        """One update, to the end; returns the bytes that this rank has sent into each window.

        tensors: this rank's parameters by canonical mcore name.
        Raises: PeerLostError; WeightSyncError where a tensor is not what the plan says.
        """
        with self._link.leaving_if_lost():
            return self._send_update(tensors, span)

    def _send_update(self, tensors: Mapping[str, torch.Tensor], span: Span) -> npt.NDArray[np.int64]:
        sent = np.zeros(len(self._plan.topology.windows), np.int64)
        for outlet in self._outlets.values():
            outlet.begin()
        for relay in self._relays:
            relay.begin()
        behind = self._plan.num_slots - 1  # what is relayed comes while the next turns are packed
        for turn in range(self._num_turns + behind):
            for relay in self._relays:
                relay.open(turn)
            with span("send bucket"):
                for message in self._send(turn, tensors):
                    sent[message.receiver] += message.num_bytes
            for wire in self._wires.all:
                wire.launch()
            for relay in self._relays:
                relay.close(turn - behind)
        for outlet in self._outlets.values():
            outlet.flush()
        self._link.flush()
        return sent

    @torch.no_grad()
    def send_digests(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """What this rank holds now, slice by slice, to the engine ranks that were sent it.

        Raises: PeerLostError.
        """
        with self._link.leaving_if_lost():
            self._send_digests(tensors)

    def _send_digests(self, tensors: Mapping[str, torch.Tensor]) -> None:
        topology = self._plan.topology
        slices: dict[int, list[Slice]] = {}
        for turn in sorted(self._departures):
            for message in self._departures[turn]:
                slices.setdefault(message.receiver, []).extend(message.slices)
        digests = {window: torch.empty(len(rows), DIGEST_BYTES, dtype=torch.uint8) for window, rows in slices.items()}
        places = [(each, digests[window][row]) for window, rows in slices.items() for row, each in enumerate(rows)]
        for each, place in sorted(places, key=lambda pair: pair[0].mcore_name):
            held = digest(part_of(each, tensors, each.shape).to(each.dtype))
            place.copy_(torch.frombuffer(bytearray(held), dtype=torch.uint8))
        sending = [
            self._link.send(digests[window], topology.member(reader), Topic(Kind.DIGESTS, window, 0))
            for window in slices
            for reader in topology.windows[window].readers
        ]
        for pending in sending:
            pending.wait()

    def _send(self, turn: int, tensors: Mapping[str, torch.Tensor]) -> Sequence[Message]:
        messages = self._departures.get(turn, [])
        opened = [self._outlets[message.receiver].open(turn, message) for message in messages]
        if turn not in self._places:
            places = [pair for message, memory in zip(messages, opened, strict=True) for pair in views(message, memory)]
            # Tensor by tensor: one under an adapter is merged when it is asked for.
            self._places[turn] = sorted(places, key=lambda pair: pair[0].mcore_name)
        for each, place in self._places[turn]:
            place.copy_(part_of(each, tensors, place.shape))
        for message in messages:
            self._outlets[message.receiver].send(turn, message)
        return messages


def part_of(each: Slice, tensors: Mapping[str, torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
    """A slice as its trainer rank holds it, a view; `shape` is the slice's.

    Raises: WeightSyncError where that is not what the plan says.
    """
    tensor = tensors.get(each.mcore_name)
    if tensor is None:
        raise WeightSyncError(f"this rank has no {each.mcore_name}, of which it is to send {each.hf_name}")
    part = tensor
    if each.hf_shape and part.dim() > each.dim and each.local_start + each.length <= part.shape[each.dim]:
        part = part.narrow(each.dim, each.local_start, each.length)
    if part.shape != shape:
        raise WeightSyncError(
            f"{each.mcore_name} {tuple(tensor.shape)} has no slice of shape {each.shape} from {each.local_start} of "
            f"dim {each.dim} for {each.hf_name}"
        )
    return part
