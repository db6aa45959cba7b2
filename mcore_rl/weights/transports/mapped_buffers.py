"""Transport through staging buffers that both sides map: host memory (shared_memory) or GPU memory (cuda_ipc).

Writers copy their messages into the slot of the round; readers load them from there. Trainer ranks that do not map the
buffer send their messages to its owner, which relays them into the slot. link.py lists the control messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.slices.messages import Message
from mcore_rl.weights.sync_plan import IncomingMessages, PlacedMessage, SyncPlan
from mcore_rl.weights.transports.interface import Channel, ReceivedMessage, Transfer
from mcore_rl.weights.transports.link import Link, MessageKind, MessageTag, PostedReceives
from mcore_rl.weights.transports.topology import StagingBuffer


@dataclass(frozen=True, eq=False)
class MappedBuffer:
    """Staging buffer `number`, mapped in this process: consecutive slots. `link` leads to its other users."""

    number: int
    plan: SyncPlan
    incoming: IncomingMessages
    memory: torch.Tensor
    link: Link

    @property
    def buffer(self) -> StagingBuffer:
        return self.plan.topology.buffers[self.number]

    @property
    def readers(self) -> list[int]:
        """Readers by their numbers in the transfer group."""
        return [self.plan.topology.member(reader) for reader in self.buffer.readers]

    def tags(self, peers: Sequence[int], kind: MessageKind, sync_round: int) -> list[tuple[int, MessageTag]]:
        """Return (peer, tag) of a control message to or from each peer."""
        return [(peer, MessageTag(kind, self.number, sync_round)) for peer in peers]

    def from_readers(self, kind: MessageKind, rounds: Iterable[int]) -> PostedReceives:
        """Return the receives of a control message from each reader in these rounds."""
        tags = {sync_round: self.tags(self.readers, kind, sync_round) for sync_round in rounds}
        return PostedReceives(self.link, tags, self.plan.num_slots)

    def notify_readers(self, kind: MessageKind, sync_round: int, num_bytes: int) -> None:
        """Notify the readers that `num_bytes` are in the slot, after queued copies on the buffer's GPU."""
        self.synchronize()
        for reader, tag in self.tags(self.readers, kind, sync_round):
            self.link.send_control(num_bytes, reader, tag)

    def synchronize(self) -> None:
        """Block until queued copies on the buffer's GPU are done. Notifications through gloo do not wait for them."""
        if self.memory.is_cuda:
            torch.cuda.current_stream().synchronize()

    def bytes_of(self, sync_round: int, placed: PlacedMessage) -> torch.Tensor:
        start = sync_round % self.plan.num_slots * self.incoming.slot_bytes + placed.offset
        return self.memory[start : start + placed.message.num_bytes]

    def direct(self, sync_round: int) -> list[PlacedMessage]:
        """Return the messages of trainer ranks that map the buffer."""
        return [placed for placed in self.incoming.at(sync_round) if placed.message.sender in self.buffer.writers]

    def relayed(self, sync_round: int) -> list[PlacedMessage]:
        """Return the messages of other trainer ranks, which the owner relays."""
        return [placed for placed in self.incoming.at(sync_round) if placed.message.sender not in self.buffer.writers]


class MappedSender:
    """MessageSender for a staging buffer that trainer rank `rank` maps."""

    def __init__(self, mapped: MappedBuffer, rank: int) -> None:
        self._mapped = mapped
        # A trainer rank has at most one message per buffer and round.
        self._placed = {
            sync_round: each
            for sync_round in mapped.incoming.rounds
            for each in mapped.direct(sync_round)
            if each.message.sender == rank
        }
        self._free = mapped.from_readers(MessageKind.FREE, self._placed)

    def begin(self) -> None:
        self._free.begin()

    def acquire(self, sync_round: int, message: Message) -> torch.Tensor:
        # All readers of the buffer must have read the slot's earlier round.
        self._free.wait(sync_round)
        return self._mapped.bytes_of(sync_round, self._placed[sync_round])

    def send(self, sync_round: int, message: Message) -> None:
        self._mapped.notify_readers(MessageKind.READY, sync_round, message.num_bytes)

    def flush(self) -> None:
        self._mapped.link.flush()


class Relay:
    """Receives messages of trainer ranks that do not map a staging buffer into it. Runs on the buffer's owner."""

    def __init__(self, mapped: MappedBuffer, channel: Channel) -> None:
        """`channel`: through which the messages arrive."""
        self._mapped = mapped
        self._channel = channel
        self._pending: dict[int, list[tuple[Transfer, torch.Tensor]]] = {}
        rounds = [each for each in mapped.incoming.rounds if mapped.relayed(each)]
        self._free = mapped.from_readers(MessageKind.FREE_TO_RELAY, rounds)

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
            num_bytes = sum(target.numel() for _, target in transfers)
            self._mapped.notify_readers(MessageKind.RELAYED, sync_round, num_bytes)


class MappedReceiver:
    """MessageReceiver for a staging buffer that this engine rank maps."""

    def __init__(self, mapped: MappedBuffer) -> None:
        self._mapped = mapped
        tags = {each: self._tags(each, MessageKind.READY, MessageKind.RELAYED) for each in mapped.incoming.rounds}
        self._ready = PostedReceives(mapped.link, tags, mapped.plan.num_slots)

    def begin(self) -> None:
        # Post the receives first: a writer may answer the first FREE message at once.
        self._ready.begin()
        for sync_round in range(self._mapped.plan.num_slots):
            self._free(sync_round)

    def receive(self, sync_round: int) -> list[ReceivedMessage]:
        mapped = self._mapped
        # In the order of _tags: one READY per writer, then one RELAYED for all relayed messages together.
        planned = [(placed.message.sender, placed.message.num_bytes) for placed in mapped.direct(sync_round)]
        if relayed := mapped.relayed(sync_round):
            assert mapped.buffer.owner is not None
            planned.append((mapped.buffer.owner, sum(placed.message.num_bytes for placed in relayed)))
        for written, (writer, num_bytes) in zip(self._ready.wait(sync_round), planned, strict=True):
            if written != num_bytes:
                name = mapped.plan.topology.name(writer)
                raise WeightSyncError(f"round {sync_round}: {name} wrote {written} bytes instead of {num_bytes}")
        return [
            ReceivedMessage(placed.message, mapped.bytes_of(sync_round, placed))
            for placed in mapped.incoming.at(sync_round)
        ]

    def release(self, sync_round: int) -> None:
        # Copies out of the slot may still be queued on the GPU, and the writers overwrite it once it is free.
        self._mapped.synchronize()
        self._free(sync_round + self._mapped.plan.num_slots)

    def finish(self) -> None:
        self._mapped.link.flush()

    def _free(self, sync_round: int) -> None:
        """Notify the writers of a round, and the owner if it relays, that the slot is free."""
        for writer, tag in self._tags(sync_round, MessageKind.FREE, MessageKind.FREE_TO_RELAY):
            self._mapped.link.send_control(sync_round, writer, tag)

    def _tags(self, sync_round: int, direct: MessageKind, relayed: MessageKind) -> list[tuple[int, MessageTag]]:
        """Return (peer, tag) for every writer of a round, and for the owner if it relays messages of the round."""
        mapped, owner = self._mapped, self._mapped.buffer.owner
        tags = mapped.tags([placed.message.sender for placed in mapped.direct(sync_round)], direct, sync_round)
        if owner is not None and mapped.relayed(sync_round):
            tags += mapped.tags([owner], relayed, sync_round)
        return tags
