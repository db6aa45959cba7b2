"""Trainer side of a weight sync: each rank sends the slices that it holds to the engine ranks that need them.

Slices are copied once, from the parameter into the staging buffer or the memory of the outgoing message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.slices.messages import Message, Slice, views
from mcore_rl.weights.sync_plan import SyncPlan
from mcore_rl.weights.transports.interface import Channels, MessageSender
from mcore_rl.weights.transports.link import MessageKind, MessageTag
from mcore_rl.weights.transports.mapped_buffers import MappedBuffer, MappedSender, Relay
from mcore_rl.weights.transports.network import NetworkSender
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
        self._link = channels.link
        self._channels = channels
        self._mapped = mapped
        self._places: dict[int, list[tuple[Slice, torch.Tensor]]] = {}
        """Views of the outgoing memory by round. They stay the same for all updates."""
        self._num_rounds = plan.num_rounds
        # Sorted by buffer: NCCL matches messages by their order, and the relays post receives in the same order.
        self._outgoing = {sync_round: sorted(messages, key=lambda each: each.receiver)
                          for sync_round, messages in plan.outgoing(rank).items()}  # fmt: skip
        targets = {message.receiver for messages in self._outgoing.values() for message in messages}
        self._senders: dict[int, MessageSender] = {
            number: MappedSender(mapped[number], rank) for number in targets & mapped.keys()
        }
        for channel in channels.all:
            remote = {number for number in targets - mapped.keys() if channels.of(number) is channel}
            outgoing = {sync_round: [each for each in messages if each.receiver in remote]
                        for sync_round, messages in self._outgoing.items()}  # fmt: skip
            self._senders |= dict.fromkeys(remote, NetworkSender(channel, plan, outgoing))
        owned = sorted(number for number, each in mapped.items() if each.buffer.owner == rank)
        self._relays = [Relay(mapped[number], channels.of(number)) for number in owned]

    def handshake(self) -> None:
        """Connect to all peers. Call once, before the first update.

        Raises: PeerLostError.
        """
        incoming = (each.incoming.messages for each in self._mapped.values())
        messages = list(chain.from_iterable((*self._outgoing.values(), *incoming)))
        peers = self._plan.peers(self._rank, messages)
        self._channels.handshake(peers, *self._plan.gpu_peers(self._rank, messages))

    def close(self) -> None:
        """Free the connections between GPUs. Afterwards this object cannot be used."""
        self._channels.close()

    @torch.no_grad()
    def send(self, tensors: Mapping[str, torch.Tensor], span: Span = nullcontext) -> npt.NDArray[np.int64]:
        """Send one complete update. Returns the bytes that this rank sent to each staging buffer.

        tensors: this rank's parameters by canonical mcore name.
        Raises: PeerLostError; WeightSyncError for a missing tensor or a shape that differs from the plan.
        """
        with self._channels.closing_on_loss():
            sent = np.zeros(len(self._plan.topology.buffers), np.int64)
            for sender in self._senders.values():
                sender.begin()
            for relay in self._relays:
                relay.begin()
            # A relay completes a round `delay` rounds after it posted the receives, so that relayed messages arrive
            # while this rank packs the next rounds.
            delay = self._plan.num_slots - 1
            for sync_round in range(self._num_rounds + delay):
                for relay in self._relays:
                    relay.post_receives(sync_round)
                with span("send bucket"):
                    for message in self._send(sync_round, tensors):
                        sent[message.receiver] += message.num_bytes
                # One launch for the sends and the relay's receives of the round: NCCL must group them (nccl.py).
                for channel in self._channels.all:
                    channel.launch()
                for relay in self._relays:
                    relay.complete(sync_round - delay)
            for sender in self._senders.values():
                sender.flush()
            self._link.flush()
            return sent

    @torch.no_grad()
    def send_digests(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Send digests of this rank's current slices to the engine ranks that received the slices.

        Raises: PeerLostError.
        """
        topology = self._plan.topology
        slices: dict[int, list[Slice]] = {}
        for sync_round in sorted(self._outgoing):
            for message in self._outgoing[sync_round]:
                slices.setdefault(message.receiver, []).extend(message.slices)
        digests = {number: torch.empty(len(rows), DIGEST_BYTES, dtype=torch.uint8) for number, rows in slices.items()}
        places = [(each, digests[number][row]) for number, rows in slices.items() for row, each in enumerate(rows)]
        for each, place in sorted(places, key=lambda pair: pair[0].mcore_name):
            computed = digest(part_of(each, tensors, each.shape).to(each.dtype))
            place.copy_(torch.frombuffer(bytearray(computed), dtype=torch.uint8))
        with self._channels.closing_on_loss():
            pending = [
                self._link.send(digests[number], topology.member(reader), MessageTag(MessageKind.DIGESTS, number, 0))
                for number in slices
                for reader in topology.buffers[number].readers
            ]
            for transfer in pending:
                transfer.wait()

    def _send(self, sync_round: int, tensors: Mapping[str, torch.Tensor]) -> Sequence[Message]:
        messages = self._outgoing.get(sync_round, [])
        acquired = [self._senders[message.receiver].acquire(sync_round, message) for message in messages]
        if sync_round not in self._places:
            places = [
                pair for message, memory in zip(messages, acquired, strict=True) for pair in views(message, memory)
            ]
            # Sorted by tensor: a LoRA adapter is merged into its tensor on access, once per consecutive use.
            self._places[sync_round] = sorted(places, key=lambda pair: pair[0].mcore_name)
        for each, place in self._places[sync_round]:
            # copy_ also converts to the dtype of the slice.
            place.copy_(part_of(each, tensors, place.shape))
        for message in messages:
            self._senders[message.receiver].send(sync_round, message)
        return messages


def part_of(each: Slice, tensors: Mapping[str, torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
    """Return a view of a slice in this rank's tensors. `shape` is the slice's shape.

    Raises: WeightSyncError for a missing tensor or a shape that differs from the plan.
    """
    tensor = tensors.get(each.mcore_name)
    if tensor is None:
        raise WeightSyncError(f"this rank has no {each.mcore_name}, which contains its slice of {each.hf_name}")
    part = tensor
    if each.hf_shape and part.dim() > each.dim and each.local_start + each.length <= part.shape[each.dim]:
        part = part.narrow(each.dim, each.local_start, each.length)
    if part.shape != shape:
        raise WeightSyncError(
            f"{each.mcore_name} {tuple(tensor.shape)} has no slice of shape {each.shape} from {each.local_start} of "
            f"dim {each.dim} for {each.hf_name}"
        )
    return part
