"""Connection of the processes of a weight sync.

The owners create the staging buffers, all processes map them and connect to the transfer group, and then the owners
remove the names of the shared memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from mcore_rl.config.quantization import FP8
from mcore_rl.errors import ConfigError
from mcore_rl.weights.receive import SliceReceiver
from mcore_rl.weights.send import WeightSender
from mcore_rl.weights.sync_plan import SyncPlan
from mcore_rl.weights.transports.arrival import Rendezvous
from mcore_rl.weights.transports.files.channel import FileChannel
from mcore_rl.weights.transports.files.run_files import shared_folder
from mcore_rl.weights.transports.interface import Channels, MessageReceiver
from mcore_rl.weights.transports.link import MAX_ROUNDS, Link
from mcore_rl.weights.transports.mapped_buffers import MappedBuffer, MappedReceiver
from mcore_rl.weights.transports.nccl import NcclChannel
from mcore_rl.weights.transports.network import NetworkReceiver
from mcore_rl.weights.transports.shared_buffer import SharedBuffer, SharedNames, Users
from model_converters.errors import LayoutError


@dataclass(frozen=True)
class Connection:
    """Arguments that every process needs to connect. `buffers`: names of the shared staging buffers, by number.
    `folder`: URL of the connection's files if weights.transport=files, else None."""

    plan: SyncPlan
    rendezvous: Rendezvous
    buffers: Mapping[int, SharedNames]
    timeout_seconds: float
    folder: str | None = None

    def attach(self, number: int) -> SharedBuffer:
        """Map staging buffer `number` into this process.

        Raises: WeightSyncError if it does not exist any more.
        """
        return SharedBuffer.attach(self.plan.topology.buffers[number], self.buffers[number], self.plan.num_slots)

    def channels(self, member: int) -> Channels:
        """Connect to the transfer group as number `member`.

        Collective: all processes of the sync; for files, only trainer ranks that quantise weights in FP8.
        """
        topology, seconds = self.plan.topology, self.timeout_seconds
        if self.folder is not None:
            folder, num_trainers, among = shared_folder(self.folder), len(topology.trainers), None
            # All trainer ranks connect, also those that divide no block: each computes only its own groups.
            if self.plan.quantization == FP8 and member < num_trainers > 1:
                among = self._link(member, num_trainers)
            return Channels(FileChannel(folder, topology, member, timeout_seconds=seconds, among_trainers=among))
        link = self._link(member, len(topology.trainers) + len(topology.engines))
        # All GPU members create the NCCL group after the gloo group: both are collective, in this order.
        members = topology.gpu_members
        if member not in members:
            return Channels(link)
        gpu = NcclChannel.connect(self.rendezvous, member, members, timeout_seconds=seconds, name=topology.name)
        return Channels(link, gpu, topology.gpu_buffers)

    def _link(self, member: int, num_members: int) -> Link:
        """Connect the first `num_members` members of the sync over gloo."""
        topology = self.plan.topology
        address = (*topology.trainers, *topology.engines)[member].address
        seconds, name = self.timeout_seconds, topology.name
        return Link.connect(self.rendezvous, member, num_members, address, timeout_seconds=seconds, name=name)


class TrainerSetup:
    """Connects a trainer rank: `create_buffers`, then `connect`, then `unlink` once all processes have connected.

    The connection ends with `disconnect` in all processes, and then `close`, which frees the buffers: CUDA does not
    define what happens to mappings of freed memory. Both also end a connection that failed half-way.
    """

    def __init__(self, plan: SyncPlan, rank: int) -> None:
        self._plan = plan
        self._rank = rank
        buffers = plan.topology.buffers
        self._incoming = plan.incoming([number for number, each in enumerate(buffers) if rank in each.writers])
        self._owned: dict[int, SharedBuffer] = {}
        """Staging buffers that this rank owns."""
        self._attached: dict[int, SharedBuffer] = {}
        """Mapped staging buffers of other ranks."""
        self._sender: WeightSender | None = None

    def create_buffers(self) -> dict[int, SharedNames]:
        """Create the staging buffers that this rank owns. Returns their names by buffer number.

        Raises: ConfigError if this host's shared memory is too small.
        """
        for number, incoming in self._incoming.items():
            buffer = self._plan.topology.buffers[number]
            if buffer.owner == self._rank:
                self._owned[number] = SharedBuffer.create(buffer, incoming.slot_bytes, self._plan.num_slots)
        return {number: shared.names for number, shared in self._owned.items()}

    def connect(self, connection: Connection) -> WeightSender:
        """Map the staging buffers of this host or GPU, and connect to all peers.

        Collective: all processes of the sync.
        """
        # Buffers are mapped before the transfer group connects: afterwards their names are removed.
        for number in self._incoming.keys() - self._owned.keys():
            self._attached[number] = connection.attach(number)
        buffers = self._owned | self._attached
        for number, shared in buffers.items():
            users = Users(self._plan.topology.buffers[number])
            shared.signals.join(users.writer(self._rank))
            if number in self._owned:
                shared.signals.join(users.relay)
        with ExitStack() as undo:
            channels = connection.channels(self._rank)
            undo.callback(channels.close)
            channels.on_close.extend(shared.signals.leave for shared in buffers.values())
            mapped = {
                number: MappedBuffer(number, self._plan, incoming, buffers[number], connection.timeout_seconds)
                for number, incoming in self._incoming.items()
            }
            self._sender = WeightSender(self._plan, self._rank, channels, mapped)
            self._sender.handshake()
            undo.pop_all()
        return self._sender

    def unlink(self) -> None:
        """Remove the names of the shared memory. Existing mappings stay valid."""
        for shared in list(self._owned.values()):  # another thread may be in `create_buffers`
            shared.unlink()

    def disconnect(self) -> None:
        """End the connections, and unmap the buffers of other ranks. Further calls do nothing.

        Raises: WeightSyncError if views of a buffer still exist.
        """
        if self._sender is not None:
            self._sender.close()
        while self._attached:
            self._attached.popitem()[1].close()

    def close(self) -> None:
        """Free the buffers of this rank. Call after all processes that map them have disconnected or ended.

        Raises: WeightSyncError if views of a buffer still exist.
        """
        self.disconnect()
        self.unlink()
        while self._owned:
            self._owned.popitem()[1].close()


def connect_engine_rank(connection: Connection, engine_rank: int) -> SliceReceiver:
    """Connect an engine rank, counted through all engines.

    Collective: all processes of the sync.
    """
    plan = connection.plan
    number = plan.topology.buffer_of(engine_rank)
    incoming = plan.incoming([number])[number]
    member = plan.topology.member(engine_rank)
    with ExitStack() as undo:
        # Map the buffer before connecting: its name is removed once all processes have connected.
        shared = connection.attach(number) if number in connection.buffers else None
        if shared is not None:
            undo.callback(shared.close)
            shared.signals.join(Users(plan.topology.buffers[number]).reader(engine_rank))
        channels = connection.channels(member)
        undo.callback(channels.close)
        channels.handshake(plan.peers(member, incoming.messages), *plan.gpu_peers(member, incoming.messages))
        messages: MessageReceiver
        if shared is None:
            messages = NetworkReceiver(channels, number, incoming, plan)
        else:
            channels.on_close.append(shared.signals.leave)
            mapped = MappedBuffer(number, plan, incoming, shared, connection.timeout_seconds)
            messages = MappedReceiver(mapped, engine_rank)
        receiver = SliceReceiver(messages, incoming, plan.num_rounds, channels, number)
        undo.pop_all()
    return receiver


def check_plan(plan: SyncPlan) -> None:
    """Check that every row fits in a bucket, that the engine's layout divides the model, and that NCCL can connect.

    Raises: ConfigError.
    """
    plan.topology.check_versions()
    try:
        if plan.num_rounds > MAX_ROUNDS:
            raise ConfigError(
                f"weights.bucket_mib: {plan.num_rounds} buckets exceed the maximum of {MAX_ROUNDS} per sync; raise it"
            )
    except LayoutError as error:
        raise ConfigError(f"weights.bucket_mib, rollout.tp: {error}") from error
