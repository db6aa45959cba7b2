"""How the processes of a weight sync come together: windows are made, then all meet, then names are removed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mcore_rl.errors import ConfigError
from mcore_rl.weights.receive import SliceReceiver
from mcore_rl.weights.send import WeightSender
from mcore_rl.weights.sync_plan import SyncPlan
from mcore_rl.weights.transports.cuda_ipc import DeviceSegment
from mcore_rl.weights.transports.interface import Inlet
from mcore_rl.weights.transports.link import MOST_TURNS, Link, Meeting
from mcore_rl.weights.transports.mapped import MappedInlet, MappedWindow
from mcore_rl.weights.transports.nccl import NcclWire
from mcore_rl.weights.transports.network import NetworkInlet
from mcore_rl.weights.transports.shared_memory import SharedSegment
from mcore_rl.weights.transports.topology import CUDA_IPC
from mcore_rl.weights.transports.wires import Wires
from model_converters.errors import LayoutError

Segment = SharedSegment | DeviceSegment
SEGMENTS: dict[bool, type[SharedSegment] | type[DeviceSegment]] = {False: SharedSegment, True: DeviceSegment}
"""By whether a window is a GPU's memory."""


@dataclass(frozen=True)
class Connection:
    """What every process is told. `segments` are the names of shared memory, by window."""

    plan: SyncPlan
    meeting: Meeting
    segments: Mapping[int, str]
    timeout_seconds: float

    def segment(self, window: int) -> Segment:
        """A window, mapped in this process.

        Raises: WeightSyncError where it is gone.
        """
        return SEGMENTS[self.plan.topology.windows[window].kind == CUDA_IPC].attach(self.segments[window])

    def wires(self, member: int) -> Wires:
        """Collective over all processes of the sync."""
        topology = self.plan.topology
        processes, seconds = (*topology.trainers, *topology.engines), self.timeout_seconds
        address = processes[member].address
        link = Link.connect(self.meeting, member, len(processes), address, timeout_seconds=seconds, name=topology.name)
        members = topology.gpu_members
        if member not in members:
            return Wires(link)
        gpu = NcclWire.connect(self.meeting, member, members, timeout_seconds=seconds, name=topology.name)
        return Wires(link, gpu, topology.gpu_windows)


class TrainerEnd:
    """A trainer rank's part: `make_windows`, then `connect`; `unlink` once all have."""

    def __init__(self, plan: SyncPlan, rank: int) -> None:
        self._plan = plan
        self._rank = rank
        windows = plan.topology.windows
        self._arrivals = plan.arrivals([number for number, each in enumerate(windows) if rank in each.writers])
        self._made: dict[int, Segment] = {}

    def make_windows(self) -> dict[int, str]:
        """Names of the windows of which this rank is the home.

        Raises: ConfigError where this host's shared memory is too small.
        """
        for number, arrivals in self._arrivals.items():
            window = self._plan.topology.windows[number]
            if window.home == self._rank:
                kind = SEGMENTS[window.kind == CUDA_IPC]
                self._made[number] = kind.create(arrivals.slot_bytes * self._plan.num_slots)
        return {number: segment.name for number, segment in self._made.items()}

    def connect(self, connection: Connection) -> WeightSender:
        """Collective over all processes of the sync."""
        mapped = {
            number: MappedWindow(
                number,
                self._plan.topology,
                arrivals,
                (self._made.get(number) or connection.segment(number)).memory,
                self._plan.num_slots,
            )
            for number, arrivals in self._arrivals.items()
        }
        sender = WeightSender(self._plan, self._rank, connection.wires(self._rank), mapped)
        sender.greet()
        return sender

    def unlink(self) -> None:
        """Leaves the windows to those who have mapped them."""
        for segment in self._made.values():
            segment.unlink()


def connect_engine_rank(connection: Connection, engine_rank: int) -> SliceReceiver:
    """`engine_rank` counts through all engines. Collective over all processes of the sync."""
    plan = connection.plan
    number = plan.topology.window_of(engine_rank)
    arrivals, num_turns = plan.arrivals([number])[number], plan.num_turns
    memory = connection.segment(number).memory if number in connection.segments else None
    wires = connection.wires(plan.topology.member(engine_rank))
    link = wires.link
    link.greet(plan.peers_of_reader(number, arrivals))
    inlet: Inlet
    if memory is None:
        inlet = NetworkInlet(wires.of(number), number, arrivals, num_turns, plan.num_slots)
    else:
        mapped = MappedWindow(number, plan.topology, arrivals, memory, plan.num_slots)
        inlet = MappedInlet(link, mapped)
    return SliceReceiver(inlet, arrivals, num_turns, link, number)


def check_plan(plan: SyncPlan) -> None:
    """Raises: ConfigError for buckets that cannot hold a row, and engines that do not divide the model."""
    try:
        if plan.num_turns > MOST_TURNS:
            raise ConfigError(
                f"weights.bucket_mib: {plan.num_turns} buckets are more than {MOST_TURNS}, the most of a sync; raise it"
            )
    except LayoutError as error:
        raise ConfigError(f"weights.bucket_mib, rollout.tp: {error}") from error
