"""Trainer side of a weight sync: each rank sends the slices that it holds to the engine ranks that need them.

Slices are copied once, from the parameter into the staging buffer or the memory of the outgoing message. Messages of a
round with the same slices share this memory (loans.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from mcore_rl.config.quantization import FP8, INT4
from mcore_rl.weights.block_maxima import BlockMaxima
from mcore_rl.weights.delta.copies import FrameBytes, SentCopies
from mcore_rl.weights.int4 import quantise_into
from mcore_rl.weights.loans import Loan, find_loans
from mcore_rl.weights.quantization import quantise_box
from mcore_rl.weights.slices.messages import Message, Slice, views
from mcore_rl.weights.sync_plan import SyncPlan
from mcore_rl.weights.tensor_parts import part_of
from mcore_rl.weights.transports.interface import Channel, Channels, MessageSender
from mcore_rl.weights.transports.link import MessageKind, MessageTag
from mcore_rl.weights.transports.mapped_buffers import MappedBuffer, MappedSender, Relay
from mcore_rl.weights.transports.network import NetworkSender
from mcore_rl.weights.transports.topology import SHARED_MEMORY
from mcore_rl.weights.verify import DIGEST_BYTES, digest

Span = Callable[[str], AbstractContextManager[object]]


class WeightSender:
    """Sends the weight updates of one trainer rank.

    `mapped`: the staging buffers that this rank maps, by number. `channels` lead to all other buffers. One object
    serves all updates of a connection; after an error all processes must connect again.
    """

    def __init__(self, plan: SyncPlan, rank: int, channels: Channels, mapped: Mapping[int, MappedBuffer]) -> None:
        self._plan = plan
        self._rank = rank
        self._channels = channels
        self._mapped = mapped
        self._places: dict[int, list[tuple[Slice, tuple[torch.Tensor, ...]]]] = {}
        """Views of the outgoing memory by round. They stay the same for all updates."""
        self._num_rounds = plan.num_rounds
        # Sorted by buffer: NCCL matches messages by their order, and the relays post receives in the same order.
        self._outgoing = {sync_round: sorted(messages, key=lambda each: each.receiver)
                          for sync_round, messages in plan.outgoing(rank).items()}  # fmt: skip
        self._loans: dict[int, dict[int, Loan]] = {sync_round: {} for sync_round in self._outgoing}
        """Messages without memory of their own, by round and buffer."""
        targets = {message.receiver for messages in self._outgoing.values() for message in messages}
        self._senders: dict[int, MessageSender] = {
            number: MappedSender(mapped[number], rank) for number in targets & mapped.keys()
        }
        remote = targets - mapped.keys()
        deltas = {number for number in remote if plan.topology.sends_delta(number, rank)}
        self._copies = SentCopies()
        if deltas:
            self._senders |= self._to_network(channels.host, deltas, self._copies)
        for channel in channels.all:
            whole = {number for number in remote - deltas if channels.of(number) is channel}
            self._find_loans(channel, whole)
            self._senders |= self._to_network(channel, whole)
        owned = sorted(number for number, each in mapped.items() if each.buffer.owner == rank)
        self._block_maxima = BlockMaxima(plan.divided_blocks(rank), rank, channels)
        self._frozen_maxima = BlockMaxima(plan.divided_blocks(rank, frozen=True), rank, channels, frozen=True)
        self._relays = [Relay(mapped[number], channels) for number in owned]

    def _find_loans(self, channel: Channel, borrowers: Set[int]) -> None:
        """Find the messages to `borrowers`, through `channel`, that can be sent from the memory of another message."""
        lenders = set(borrowers)
        if channel is self._channels.host:
            lenders |= {number for number, each in self._mapped.items() if each.buffer.kind == SHARED_MEMORY}
        for sync_round, messages in self._outgoing.items():
            self._loans[sync_round] |= find_loans([each for each in messages if each.receiver in lenders], borrowers)

    def _to_network(
        self, channel: Channel, buffers: Set[int], copies: SentCopies | None = None
    ) -> dict[int, MessageSender]:
        outgoing = {sync_round: [each for each in messages if each.receiver in buffers - self._loans[sync_round].keys()]
                    for sync_round, messages in self._outgoing.items()}  # fmt: skip
        return dict.fromkeys(buffers, NetworkSender(channel, self._plan, outgoing, copies))

    @property
    def delta_bytes(self) -> FrameBytes:
        """Bytes of the last update's messages to other hosts; 0 without weights.delta."""
        return self._copies.bytes

    def handshake(self) -> None:
        """Connect to all peers. Call once, before the first update.

        Raises: PeerLostError.
        """
        incoming = (each.incoming.messages for each in self._mapped.values())
        messages = list(chain.from_iterable((*self._outgoing.values(), *incoming)))
        peers = self._plan.peers(self._rank, messages) | self._block_maxima.peers | self._frozen_maxima.peers
        self._channels.handshake(peers, *self._plan.gpu_peers(self._rank, messages))

    def close(self) -> None:
        """End the connections, and release all views of the staging buffers, which may be unmapped or freed then.
        Afterwards this object cannot be used; further calls do nothing."""
        self._channels.close()  # first: a transfer that has not ended would write into the buffers
        for mapped in self._mapped.values():
            mapped.synchronize()  # copies that an error left in the queue
        self._mapped = {}
        self._places.clear()
        self._senders.clear()
        self._copies = SentCopies()
        self._relays.clear()

    @torch.no_grad()
    def send(
        self, tensors: Mapping[str, torch.Tensor], span: Span = nullcontext, *, first_round: int = 0
    ) -> npt.NDArray[np.int64]:
        """Send one update. Returns the bytes that this rank sent to each staging buffer.

        tensors: this rank's parameters by canonical mcore name.
        first_round: 0, or SyncPlan.first_trained_round if all engines hold the frozen weights; equal in all processes.
        Raises: PeerLostError; WeightSyncError for a missing tensor or a shape that differs from the plan.
        """
        with self._channels.closing_on_loss():
            sent = np.zeros(len(self._plan.topology.buffers), np.int64)
            maxima = self._block_maxima.combine(tensors)
            if not first_round:
                maxima |= self._frozen_maxima.combine(tensors)
            self._copies.reset(self._plan.first_trained_round if first_round else 0)
            # A relay completes a round `delay` rounds after it posted the receives, so that relayed messages arrive
            # while this rank packs the next rounds.
            delay = self._plan.num_slots - 1
            for relay in self._relays:
                relay.begin(first_round)
            for sync_round in range(first_round, self._num_rounds + delay):
                for relay in self._relays:
                    relay.post_receives(sync_round)
                with span("send bucket"):
                    for message in self._send(sync_round, tensors, maxima):
                        sent[message.receiver] += message.num_bytes
                # One launch for the sends and the relay's receives of the round: NCCL must group them (nccl.py).
                for channel in self._channels.all:
                    channel.launch()
                for relay in self._relays:
                    relay.complete(sync_round - delay)
            for sender in self._senders.values():
                sender.flush()
            self._channels.host.flush()
            return sent

    @torch.no_grad()
    def send_digests(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Send digests of this rank's current slices to the engine ranks that received the slices.

        Raises: PeerLostError.
        """
        topology, host = self._plan.topology, self._channels.host
        with self._channels.closing_on_loss():
            maxima = self._block_maxima.combine(tensors) | self._frozen_maxima.combine(tensors)
        slices: dict[int, list[Slice]] = {}
        for sync_round in sorted(self._outgoing):
            for message in self._outgoing[sync_round]:
                slices.setdefault(message.receiver, []).extend(message.slices)
        digests: dict[int, torch.Tensor] = {}
        places: list[tuple[Slice, torch.Tensor]] = []
        for number, of_buffer in slices.items():
            counts = [len(each.boxes) for each in of_buffer]
            digests[number] = torch.empty(sum(counts), DIGEST_BYTES, dtype=torch.uint8)
            places += zip(of_buffer, digests[number].split(counts), strict=True)
        for each, rows in sorted(places, key=lambda pair: pair[0].mcore_name):
            part = part_of(each, tensors, each.shape)
            values = tuple(torch.empty(box.shape, dtype=box.dtype, device=part.device) for box in each.boxes)
            self._write(each, part, values, maxima)
            for value, row in zip(values, rows, strict=True):
                row.copy_(torch.frombuffer(bytearray(digest(value)), dtype=torch.uint8))
        with self._channels.closing_on_loss():
            pending = [
                host.send(digests[number], recipient, MessageTag(MessageKind.DIGESTS, number, 0))
                for number in slices
                for recipient in topology.recipients(number)
            ]
            for transfer in pending:
                transfer.wait()
            host.flush()

    def _send(
        self, sync_round: int, tensors: Mapping[str, torch.Tensor], maxima: Mapping[str, torch.Tensor]
    ) -> Sequence[Message]:
        messages, loans = self._outgoing.get(sync_round, []), self._loans.get(sync_round, {})
        for sender in self._senders.values():
            sender.wait_for_slot(sync_round)
        packed = [message for message in messages if message.receiver not in loans]
        memory = {each.receiver: self._senders[each.receiver].acquire(sync_round, each) for each in packed}
        if sync_round not in self._places:
            places = [pair for message in packed for pair in views(message, memory[message.receiver])]
            # Sorted by tensor: a LoRA adapter is merged into its tensor on access, once per consecutive use.
            self._places[sync_round] = sorted(places, key=lambda pair: pair[0].mcore_name)
        for each, of_boxes in self._places[sync_round]:
            self._write(each, part_of(each, tensors, each.shape), of_boxes, maxima)
        for message in messages:
            lender, offset = loans.get(message.receiver, Loan(message.receiver, 0))
            part = memory[lender][offset : offset + message.num_bytes]
            self._senders[message.receiver].send(sync_round, message, part)
        return messages

    def _write(
        self,
        each: Slice,
        part: torch.Tensor,
        places: tuple[torch.Tensor, ...],
        maxima: Mapping[str, torch.Tensor],
    ) -> None:
        """Write the boxes of a slice, whose values are `part` of this rank's tensor. maxima: of divided blocks."""
        if each.quantization == INT4:
            quantise_into(part, places, hf_name=each.hf_name, dtype=each.dtype, group=each.group)
        elif each.quantization == FP8:
            shared = maxima[each.hf_name].to(part.device) if each.hf_name in maxima else None
            powers = self._plan.power_of_two_scales
            quantise_box(part, places, each.boxes[0], each.dtype, maxima=shared, power_of_two=powers)
        else:
            places[0].copy_(part)  # converts to the dtype of the slice
