"""Transport over the network, or through files: packed messages from trainer ranks to the process that owns the memory
of a buffer.

That process is the engine rank itself, or, for a buffer that other trainer ranks map, the buffer's owner.
No signals are needed: a send completes only with its receive. With weights.delta, messages between hosts are
frames (delta/), whose size is not known in advance: a receive of gloo accepts a shorter message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch

from mcore_rl.weights.delta.copies import HeldCopies, SentCopies
from mcore_rl.weights.slices.messages import Message
from mcore_rl.weights.sync_plan import IncomingMessages, PlacedMessage, SyncPlan
from mcore_rl.weights.transports.interface import Channel, Channels, ReceivedMessage, Transfer
from mcore_rl.weights.transports.link import MessageKind, MessageTag


class NetworkSender:
    """MessageSender for all buffers that this trainer rank does not map and reaches through `channel`.

    `outgoing`: its messages to them that need memory of their own, by round. `copies`: of messages that are sent as
    frames; None: all are sent whole.
    """

    def __init__(
        self,
        channel: Channel,
        plan: SyncPlan,
        outgoing: Mapping[int, Sequence[Message]],
        copies: SentCopies | None = None,
    ) -> None:
        self._channel = channel
        self._copies = copies
        self._topology = plan.topology
        self._num_slots = plan.num_slots
        self._offsets: dict[tuple[int, int], int] = {}
        """Offset in a slot by (round, receiver), in bytes."""
        self._pending: dict[int, list[Transfer]] = {}
        self._slot_bytes = 0
        for sync_round, messages in outgoing.items():
            used = 0
            for message in messages:
                self._offsets[sync_round, message.receiver] = used
                used += message.num_bytes
            self._slot_bytes = max(self._slot_bytes, used)

    # Allocated on first use: many trainer ranks have no messages for this channel.
    @cached_property
    def _staging(self) -> torch.Tensor:
        return torch.zeros(self._slot_bytes * self._num_slots, dtype=torch.uint8, device=self._channel.device)

    def wait_for_slot(self, sync_round: int) -> None:
        self._wait_for([earlier for earlier in self._pending if earlier <= sync_round - self._num_slots])

    def acquire(self, sync_round: int, message: Message) -> torch.Tensor:
        start = sync_round % self._num_slots * self._slot_bytes + self._offsets[sync_round, message.receiver]
        return self._staging[start : start + message.num_bytes]

    def send(self, sync_round: int, message: Message, memory: torch.Tensor) -> None:
        tag = MessageTag(MessageKind.WEIGHTS, message.receiver, sync_round)
        target = self._topology.target(message.receiver)
        if self._copies is not None:
            memory = self._copies.frame(message, memory)
        pending = self._channel.send(memory, target, tag)
        self._pending.setdefault(sync_round, []).append(pending)

    def flush(self) -> None:
        self._wait_for(sorted(self._pending))

    def _wait_for(self, rounds: Sequence[int]) -> None:
        for sync_round in rounds:
            for pending in self._pending.pop(sync_round):
                pending.wait()


class NetworkReceiver:
    """MessageReceiver of an engine rank that shares no memory with trainer ranks."""

    def __init__(self, channels: Channels, buffer: int, incoming: IncomingMessages, plan: SyncPlan) -> None:
        self._channels = channels
        self._channel = channels.of(buffer)
        self._topology = plan.topology
        self._copies = HeldCopies(plan.topology.name)
        self._buffer = buffer
        self._incoming = incoming
        self._num_rounds = plan.num_rounds
        self._num_frozen = plan.first_trained_round
        self._num_slots = plan.num_slots
        self._pending: dict[int, list[Transfer]] = {}

    @cached_property
    def _slots(self) -> torch.Tensor:
        shape = self._num_slots, self._incoming.slot_bytes
        return torch.zeros(shape, dtype=torch.uint8, device=self._channel.device)

    def begin(self, first_round: int) -> None:
        if first_round:
            self._copies.forget_frozen(self._num_frozen)
        for sync_round in range(first_round, first_round + self._num_slots):
            self._post(sync_round)

    def receive(self, sync_round: int) -> list[ReceivedMessage]:
        received = []
        for placed, pending in zip(self._incoming.at(sync_round), self._pending.pop(sync_round), strict=True):
            pending.wait()
            memory = pending.memory
            if self._topology.sends_delta(self._buffer, placed.message.sender):
                memory = self._copies.apply(placed.message, memory)
            received.append(ReceivedMessage(placed.message, memory))
        return received

    def release(self, sync_round: int) -> None:
        # Posting the receive for the slot's next round is what allows its senders to proceed.
        self._post(sync_round + self._num_slots)

    def close(self) -> None:
        self._pending.clear()
        self._copies = HeldCopies(self._topology.name)
        self.__dict__.pop("_slots", None)

    def _post(self, sync_round: int) -> None:
        if sync_round >= self._num_rounds:
            return  # `release` also runs for the last rounds, whose slots are not used again in this update
        self._pending[sync_round] = [self._receive(sync_round, placed) for placed in self._incoming.at(sync_round)]
        self._channel.launch()

    def _receive(self, sync_round: int, placed: PlacedMessage) -> Transfer:
        message, tag = placed.message, MessageTag(MessageKind.WEIGHTS, self._buffer, sync_round)
        if self._topology.sends_delta(self._buffer, message.sender):
            return self._channels.host.receive(self._copies.frame_memory(message), message.sender, tag)
        slot = self._slots[sync_round % self._num_slots]
        return self._channel.receive(slot[placed.offset :][: message.num_bytes], message.sender, tag)
