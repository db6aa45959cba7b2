"""Connection of the processes of a weight sync.

The owners create the staging buffers, all processes map them and connect to the transfer group, and then the owners
remove the names of the shared memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mcore_rl.errors import ConfigError
from mcore_rl.weights.receive import SliceReceiver
from mcore_rl.weights.send import WeightSender
from mcore_rl.weights.sync_plan import SyncPlan
from mcore_rl.weights.transports.interface import Channels, MessageReceiver
from mcore_rl.weights.transports.link import MAX_ROUNDS, Link, Rendezvous
from mcore_rl.weights.transports.mapped_buffers import MappedBuffer, MappedReceiver
from mcore_rl.weights.transports.nccl import NcclChannel
from mcore_rl.weights.transports.network import NetworkReceiver
from mcore_rl.weights.transports.segments import SEGMENTS, Segment
from mcore_rl.weights.transports.topology import CUDA_IPC
from model_converters.errors import LayoutError


@dataclass(frozen=True)
class Connection:
    """Arguments that every process needs to connect. `segments`: names of the shared memory, by buffer number."""

    plan: SyncPlan
    rendezvous: Rendezvous
    segments: Mapping[int, str]
    timeout_seconds: float

    def segment(self, number: int) -> Segment:
        """Map staging buffer `number` into this process.

        Raises: WeightSyncError if it does not exist any more.
        """
        return SEGMENTS[self.plan.topology.buffers[number].kind == CUDA_IPC].attach(self.segments[number])

    def channels(self, member: int) -> Channels:
        """Connect to the transfer group as number `member`.

        Collective: all processes of the sync.
        """
        topology = self.plan.topology
        processes, seconds = (*topology.trainers, *topology.engines), self.timeout_seconds
        address = processes[member].address
        link = Link.connect(
            self.rendezvous, member, len(processes), address, timeout_seconds=seconds, name=topology.name
        )
        # All GPU members create the NCCL group after the gloo group: both are collective, in this order.
        members = topology.gpu_members
        if member not in members:
            return Channels(link)
        gpu = NcclChannel.connect(self.rendezvous, member, members, timeout_seconds=seconds, name=topology.name)
        return Channels(link, gpu, topology.gpu_buffers)


class TrainerSetup:
    """Connects a trainer rank: `create_buffers`, then `connect`, then `unlink` once all processes have connected."""

    def __init__(self, plan: SyncPlan, rank: int) -> None:
        self._plan = plan
        self._rank = rank
        buffers = plan.topology.buffers
        self._incoming = plan.incoming([number for number, each in enumerate(buffers) if rank in each.writers])
        self._segments: dict[int, Segment] = {}

    def create_buffers(self) -> dict[int, str]:
        """Create the staging buffers that this rank owns. Returns their names by buffer number.

        Raises: ConfigError if this host's shared memory is too small.
        """
        for number, incoming in self._incoming.items():
            buffer = self._plan.topology.buffers[number]
            if buffer.owner == self._rank:
                kind = SEGMENTS[buffer.kind == CUDA_IPC]
                self._segments[number] = kind.create(incoming.slot_bytes * self._plan.num_slots)
        return {number: segment.name for number, segment in self._segments.items()}

    def connect(self, connection: Connection) -> WeightSender:
        """Map the staging buffers of this host or GPU, and connect to all peers.

        Collective: all processes of the sync.
        """
        # Buffers are mapped before the transfer group connects: afterwards their names are removed.
        memories = {
            number: (self._segments.get(number) or connection.segment(number)).memory for number in self._incoming
        }
        channels = connection.channels(self._rank)
        mapped = {
            number: MappedBuffer(number, self._plan, incoming, memories[number], channels.link)
            for number, incoming in self._incoming.items()
        }
        sender = WeightSender(self._plan, self._rank, channels, mapped)
        sender.handshake()
        return sender

    def unlink(self) -> None:
        """Remove the names of the shared memory. Existing mappings stay valid."""
        for segment in self._segments.values():
            segment.unlink()


def connect_engine_rank(connection: Connection, engine_rank: int) -> SliceReceiver:
    """Connect an engine rank, counted through all engines.

    Collective: all processes of the sync.
    """
    plan = connection.plan
    number = plan.topology.buffer_of(engine_rank)
    incoming = plan.incoming([number])[number]
    # Map the buffer before connecting: its name is removed once all processes have connected.
    memory = connection.segment(number).memory if number in connection.segments else None
    member = plan.topology.member(engine_rank)
    channels = connection.channels(member)
    channels.handshake(plan.peers(member, incoming.messages), *plan.gpu_peers(member, incoming.messages))
    messages: MessageReceiver
    if memory is None:
        messages = NetworkReceiver(channels.of(number), number, incoming, plan)
    else:
        messages = MappedReceiver(MappedBuffer(number, plan, incoming, memory, channels.link))
    return SliceReceiver(messages, incoming, plan.num_rounds, channels, number)


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
