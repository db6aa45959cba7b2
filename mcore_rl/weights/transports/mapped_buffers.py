"""Transport through staging buffers that both sides map: host memory (shared_memory) or GPU memory (cuda_ipc).

Writers copy their messages into the slot of the round; readers load them from there. Trainer ranks that do not map the
buffer send their messages to its owner, which relays them into the slot. link.py lists the control messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.slices.messages import Message
from mcore_rl.weights.sync_plan import IncomingMessages, PlacedMessage
from mcore_rl.weights.transports.interface import Channel, ReceivedMessage, Transfer
from mcore_rl.weights.transports.link import Link, MessageKind, MessageTag, PostedReceives
from mcore_rl.weights.transports.topology import StagingBuffer, Topology


@dataclass(frozen=True, eq=False)
class MappedBuffer:
    """Staging buffer `number`, mapped in this process: `num_slots` consecutive slots."""

    number: int
    topology: Topology
    incoming: IncomingMessages
    memory: torch.Tensor
    num_slots: int

    @property
    def buffer(self) -> StagingBuffer:
        return self.topology.buffers[self.number]

    @property
    def readers(self) -> list[int]:
        """Readers by their numbers in the transfer group."""
        return [self.topology.member(reader) for reader in self.buffer.readers]

    @property
    def owner(self) -> list[int]:
        return [] if self.buffer.owner is None else [self.buffer.owner]

    def tags(self, peers: Sequence[int], kind: MessageKind, sync_round: int) -> list[tuple[int, MessageTag]]:
        """Return (peer, tag) of a control message to or from each peer."""
        return [(peer, MessageTag(kind, self.number, sync_round)) for peer in peers]

    def synchronize(self) -> None:
        """Block until queued copies on the buffer's GPU are done, before other processes are notified."""
        if self.memory.is_cuda:
            torch.cuda.current_stream().synchronize()

    def bytes_of(self, sync_round: int, placed: PlacedMessage) -> torch.Tensor:
        start = sync_round % self.num_slots * self.incoming.slot_bytes + placed.offset
        return self.memory[start : start + placed.message.num_bytes]

    def direct(self, sync_round: int) -> list[PlacedMessage]:
        """Return the messages of trainer ranks that map the buffer."""
        return [placed for placed in self.incoming.at(sync_round) if placed.message.sender in self.buffer.writers]

    def relayed(self, sync_round: int) -> list[PlacedMessage]:
        """Return the messages of other trainer ranks, which the owner relays."""
        return [placed for placed in self.incoming.at(sync_round) if placed.message.sender not in self.buffer.writers]


class MappedSender:
    """MessageSender for a staging buffer that trainer rank `rank` maps."""

    def __init__(self, link: Link, mapped: MappedBuffer, rank: int) -> None:
        self._link = link
        self._mapped = mapped
        # A trainer rank has at most one message per buffer and round.
        self._placed = {
            sync_round: each
            for sync_round in mapped.incoming.rounds
            for each in mapped.direct(sync_round)
            if each.message.sender == rank
        }
        free = {each: mapped.tags(mapped.readers, MessageKind.FREE, each) for each in self._placed}
        self._free = PostedReceives(link, free, mapped.num_slots)

    def begin(self) -> None:
        self._free.begin()

    def acquire(self, sync_round: int, message: Message) -> torch.Tensor:
        # All readers of the buffer must have read the slot's earlier round.
        self._free.wait(sync_round)
        return self._mapped.bytes_of(sync_round, self._placed[sync_round])

    def send(self, sync_round: int, message: Message) -> None:
        self._mapped.synchronize()
        for reader, tag in self._mapped.tags(self._mapped.readers, MessageKind.READY, sync_round):
            self._link.send_control(message.num_bytes, reader, tag)

    def flush(self) -> None:
        self._link.flush()


class Relay:
    """Receives messages of trainer ranks that do not map a staging buffer into it. Runs on the buffer's owner."""

    def __init__(self, link: Link, channel: Channel, mapped: MappedBuffer) -> None:
        """`channel`: through which the messages arrive."""
        self._link = link
        self._channel = channel
        self._mapped = mapped
        self._pending: dict[int, list[tuple[Transfer, torch.Tensor]]] = {}
        rounds = [each for each in mapped.incoming.rounds if mapped.relayed(each)]
        free = {each: mapped.tags(mapped.readers, MessageKind.FREE_TO_RELAY, each) for each in rounds}
        self._free = PostedReceives(link, free, mapped.num_slots)

    def begin(self) -> None:
        self._free.begin()

    def post_receives(self, sync_round: int) -> None:
        """Wait until the slot is free, then post the receives of a round.

        Raises: PeerLostError.
        """
        self._free.wait(sync_round)
        tag = MessageTag(MessageKind.WEIGHTS, self._mapped.number, sync_round)
        for placed in self._mapped.relayed(sync_round):
            target = self._mapped.bytes_of(sync_round, placed)
            # A channel of host memory cannot receive into GPU memory: receive into pinned memory, copy in `complete`.
            direct = target.device.type == self._channel.device.type
            memory = target if direct else torch.empty(target.shape, dtype=torch.uint8, pin_memory=True)
            pending = self._channel.receive(memory, placed.message.sender, tag)
            self._pending.setdefault(sync_round, []).append((pending, target))

    def complete(self, sync_round: int) -> None:
        """Wait for the messages of a round, then notify the readers.

        Raises: PeerLostError.
        """
        transfers = self._pending.pop(sync_round, [])
        for pending, target in transfers:
            pending.wait()
            if pending.memory is not target:
                target.copy_(pending.memory)
        if transfers:
            # Readers are notified through gloo, which does not wait for copies on the GPU.
            self._mapped.synchronize()
            num_bytes = sum(target.numel() for _, target in transfers)
            for reader, tag in self._mapped.tags(self._mapped.readers, MessageKind.RELAYED, sync_round):
                self._link.send_control(num_bytes, reader, tag)


class MappedReceiver:
    """MessageReceiver for a staging buffer that this engine rank maps."""

    def __init__(self, link: Link, mapped: MappedBuffer) -> None:
        self._link = link
        self._mapped = mapped
        ready = {each: self._ready_tags(each) for each in mapped.incoming.rounds}
        self._ready = PostedReceives(link, ready, mapped.num_slots)

    def begin(self) -> None:
        # Post the receives first: a writer may answer the first FREE message at once.
        self._ready.begin()
        for sync_round in range(self._mapped.num_slots):
            self._free(sync_round)

    def receive(self, sync_round: int) -> list[ReceivedMessage]:
        mapped = self._mapped
        # In the order of _ready_tags: one READY per writer, then one RELAYED for all relayed messages together.
        planned = [placed.message.num_bytes for placed in mapped.direct(sync_round)]
        if mapped.relayed(sync_round):
            planned.append(sum(placed.message.num_bytes for placed in mapped.relayed(sync_round)))
        reported = self._ready.wait(sync_round)
        for written, num_bytes, (writer, _) in zip(reported, planned, self._ready_tags(sync_round), strict=True):
            if written != num_bytes:
                name = mapped.topology.name(writer)
                raise WeightSyncError(f"round {sync_round}: {name} wrote {written} bytes instead of {num_bytes}")
        return [
            ReceivedMessage(placed.message, mapped.bytes_of(sync_round, placed))
            for placed in mapped.incoming.at(sync_round)
        ]

    def release(self, sync_round: int) -> None:
        # Copies out of the slot may still be queued on the GPU, and the writers overwrite it once it is free.
        self._mapped.synchronize()
        self._free(sync_round + self._mapped.num_slots)

    def finish(self) -> None:
        self._link.flush()

    def _ready_tags(self, sync_round: int) -> list[tuple[int, MessageTag]]:
        return self._tags(sync_round, MessageKind.READY, MessageKind.RELAYED)

    def _free(self, sync_round: int) -> None:
        """Notify the writers of a round, and the owner if it relays, that the slot is free."""
        for writer, tag in self._tags(sync_round, MessageKind.FREE, MessageKind.FREE_TO_RELAY):
            self._link.send_control(sync_round, writer, tag)

    def _tags(self, sync_round: int, direct: MessageKind, relayed: MessageKind) -> list[tuple[int, MessageTag]]:
        """Return (peer, tag) for every writer of a round, and for the owner if it relays messages of the round."""
        mapped = self._mapped
        tags = mapped.tags([placed.message.sender for placed in mapped.direct(sync_round)], direct, sync_round)
        return tags + (mapped.tags(mapped.owner, relayed, sync_round) if mapped.relayed(sync_round) else [])
