"""Transport through staging buffers that both sides map: host memory (shared_memory) or GPU memory (cuda_ipc).

Writers copy their messages into the slot of the round; readers load them from there. Trainer ranks that do not map the
buffer send their messages to its owner, which relays them into the slot. Signals between users, by round r of the
users that write in it:

    reader -> writer or relay    the reader has read round r - num_slots, so the slot may be written
    writer or relay -> reader    its messages are in the slot

A user that writes waits once per round for each reader, and a reader once per round for each of its sources. Both go
through the rounds in order, so counts of signals are enough, and none is left after an update.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.delta.copies import HeldCopies
from mcore_rl.weights.slices.messages import Message
from mcore_rl.weights.sync_plan import IncomingMessages, PlacedMessage, SyncPlan
from mcore_rl.weights.transports.interface import Channels, ReceivedMessage, Transfer
from mcore_rl.weights.transports.link import MessageKind, MessageTag
from mcore_rl.weights.transports.shared_buffer import SharedBuffer, Users
from mcore_rl.weights.transports.topology import StagingBuffer


@dataclass(frozen=True, eq=False)
class MappedBuffer:
    """Staging buffer `number`, mapped in this process: consecutive slots. `timeout_seconds`: of a wait for a signal."""

    number: int
    plan: SyncPlan
    incoming: IncomingMessages
    shared: SharedBuffer
    timeout_seconds: float

    @property
    def buffer(self) -> StagingBuffer:
        return self.plan.topology.buffers[self.number]

    # Not a field: a view that is kept would prevent the segment from being unmapped.
    @property
    def memory(self) -> torch.Tensor:
        return self.shared.segment.memory

    @property
    def users(self) -> Users:
        return Users(self.buffer)

    def wait_until_free(self, user: int) -> None:
        """Wait as a writer or as the relay until every reader has read the earlier round of the user's next slot.

        Raises: PeerLostError.
        """
        for reader in self.users.readers:
            self._wait(reader, user)

    def notify_readers(self, user: int, sync_round: int, num_bytes: int) -> None:
        """Notify the readers as a writer or as the relay that `num_bytes` are in the slot, after queued copies on the
        buffer's GPU."""
        self.synchronize()
        self.shared.signals.set_bytes_written(user, sync_round % self.plan.num_slots, num_bytes)
        for reader in self.users.readers:
            self.shared.signals.post(user, reader)

    def wait_for(self, user: int, reader: int, sync_round: int, num_bytes: int) -> None:
        """Wait as a reader until a writer or the relay has written its `num_bytes` of a round.

        Raises: PeerLostError; WeightSyncError for another number of bytes.
        """
        self._wait(user, reader)
        written = self.shared.signals.bytes_written(user, sync_round % self.plan.num_slots)
        if written != num_bytes:
            raise WeightSyncError(
                f"round {sync_round}: {self._name(user)} wrote {written} bytes instead of {num_bytes}"
            )

    def _wait(self, source: int, target: int) -> None:
        self.shared.signals.wait(source, target, timeout_seconds=self.timeout_seconds, name=self._name(source))

    def _name(self, user: int) -> str:
        topology, buffer, users = self.plan.topology, self.buffer, self.users
        if user in users.readers:
            return topology.name(topology.member(buffer.readers[user - users.readers.start]))
        member = buffer.owner if user == users.relay else buffer.writers[user]
        assert member is not None
        return topology.name(member)

    def synchronize(self) -> None:
        """Block until queued copies on the buffer's GPU are done. Signals do not wait for them."""
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
        self._user = mapped.users.writer(rank)
        # A trainer rank has at most one message per buffer and round.
        self._placed = {
            sync_round: each
            for sync_round in mapped.incoming.rounds
            for each in mapped.direct(sync_round)
            if each.message.sender == rank
        }

    def wait_for_slot(self, sync_round: int) -> None:
        """Do nothing: only readers use the slot, and `acquire` waits for them."""

    def acquire(self, sync_round: int, message: Message) -> torch.Tensor:
        self._mapped.wait_until_free(self._user)
        return self._mapped.bytes_of(sync_round, self._placed[sync_round])

    def send(self, sync_round: int, message: Message, memory: torch.Tensor) -> None:
        self._mapped.notify_readers(self._user, sync_round, message.num_bytes)

    def flush(self) -> None:
        """Do nothing: a message has arrived when it is written."""


class Relay:
    """Receives messages of trainer ranks that do not map a staging buffer into it. Runs on the buffer's owner."""

    def __init__(self, mapped: MappedBuffer, channels: Channels) -> None:
        self._mapped = mapped
        self._channel = channels.of(mapped.number)
        self._link = channels.link
        self._copies = HeldCopies(mapped.plan.topology.name)
        self._pending: dict[int, list[tuple[PlacedMessage, Transfer]]] = {}
        self._rounds = frozenset(each for each in mapped.incoming.rounds if mapped.relayed(each))

    def begin(self, first_round: int) -> None:
        """Begin an update whose first round is `first_round`."""
        if first_round:
            self._copies.forget_frozen(self._mapped.plan.first_trained_round)

    def post_receives(self, sync_round: int) -> None:
        """Wait until the slot is free, then post the receives of a round.

        Raises: PeerLostError.
        """
        if sync_round not in self._rounds:
            return
        self._mapped.wait_until_free(self._mapped.users.relay)
        tag = MessageTag(MessageKind.WEIGHTS, self._mapped.number, sync_round)
        for placed in self._mapped.relayed(sync_round):
            pending = self._receive(sync_round, placed, tag)
            self._pending.setdefault(sync_round, []).append((placed, pending))

    def _receive(self, sync_round: int, placed: PlacedMessage, tag: MessageTag) -> Transfer:
        message, target = placed.message, self._mapped.bytes_of(sync_round, placed)
        if self._is_delta(message):
            return self._link.receive(self._copies.frame_memory(message), message.sender, tag)
        # A channel of host memory cannot receive into GPU memory: receive into pinned memory, copy in `complete`.
        direct = target.device.type == self._channel.device.type
        memory = target if direct else torch.empty(target.shape, dtype=torch.uint8, pin_memory=True)
        return self._channel.receive(memory, message.sender, tag)

    def _is_delta(self, message: Message) -> bool:
        return self._mapped.plan.topology.sends_delta(self._mapped.number, message.sender)

    def complete(self, sync_round: int) -> None:
        """Wait for the messages of a round, then notify the readers.

        Raises: PeerLostError; WeightSyncError if the bytes differ from the sender's.
        """
        transfers = self._pending.pop(sync_round, [])
        for placed, pending in transfers:
            pending.wait()
            memory, target = pending.memory, self._mapped.bytes_of(sync_round, placed)
            if self._is_delta(placed.message):
                memory = self._copies.apply(placed.message, memory)
            if memory.data_ptr() != target.data_ptr():
                target.copy_(memory)
        if transfers:
            num_bytes = sum(placed.message.num_bytes for placed, _ in transfers)
            self._mapped.notify_readers(self._mapped.users.relay, sync_round, num_bytes)


class MappedReceiver:
    """MessageReceiver for a staging buffer that engine rank `engine_rank` maps."""

    def __init__(self, mapped: MappedBuffer, engine_rank: int) -> None:
        self._mapped = mapped
        self._user = mapped.users.reader(engine_rank)
        self._sources = {sync_round: self._sources_of(sync_round) for sync_round in mapped.incoming.rounds}

    def begin(self, first_round: int) -> None:
        for sync_round in range(first_round, first_round + self._mapped.plan.num_slots):
            self._free(sync_round)

    def receive(self, sync_round: int) -> list[ReceivedMessage]:
        mapped = self._mapped
        for source, num_bytes in self._sources.get(sync_round, []):
            mapped.wait_for(source, self._user, sync_round, num_bytes)
        return [
            ReceivedMessage(placed.message, mapped.bytes_of(sync_round, placed))
            for placed in mapped.incoming.at(sync_round)
        ]

    def release(self, sync_round: int) -> None:
        # Copies out of the slot may still be queued on the GPU, and the writers overwrite it once it is free.
        self._mapped.synchronize()
        self._free(sync_round + self._mapped.plan.num_slots)

    def close(self) -> None:
        self._mapped.synchronize()
        self._mapped.shared.close()

    def _free(self, sync_round: int) -> None:
        """Notify the writers of a round, and the relay if it has messages, that the slot is free."""
        for source, _ in self._sources.get(sync_round, []):
            self._mapped.shared.signals.post(self._user, source)

    def _sources_of(self, sync_round: int) -> list[tuple[int, int]]:
        """Return the users that write in a round, and their bytes."""
        mapped = self._mapped
        direct = [each.message for each in mapped.direct(sync_round)]
        sources = [(mapped.users.writer(message.sender), message.num_bytes) for message in direct]
        if relayed := mapped.relayed(sync_round):
            sources.append((mapped.users.relay, sum(each.message.num_bytes for each in relayed)))
        return sources
