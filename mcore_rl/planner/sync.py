"""What one weight sync moves, and the least possible: every engine rank gets its own slices of each tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from mcore_rl.config import num_trainer_ranks
from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError
from mcore_rl.resolved.placement import Slot, place
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.slices.routes import RankLocations
from mcore_rl.weights.slices.shard_map import ShardMap
from mcore_rl.weights.slices.totals import count as count_totals
from model_converters.errors import LayoutError
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.placement import Placement
from model_converters.mapping.table import BoundRow

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class WeightSync:
    """Of one sync.

    `bytes_per_engine_rank`: what the fullest rank receives; `floor_bytes_per_engine_rank`: what it keeps.
    `slots_bytes`: the windows in a host's memory. `busiest_sender_bytes`: to other devices. `seconds`: of what crosses
    hosts, at plan.network_gib_per_second; None without it, or where nothing does.
    """

    bytes_per_engine_rank: int
    floor_bytes_per_engine_rank: int
    buckets: int
    transport: str
    total_bytes: int
    slots_bytes: int
    bytes_crossing_hosts: int
    busiest_sender_bytes: int
    seconds: float | None


def weight_sync(config: Config, rows: Sequence[BoundRow], layout: TrainLayout, *, cuda: bool) -> WeightSync:
    """Raises: ConfigError for buckets that are too small for a row, or an engine that does not divide; LayoutError."""
    engine = EngineLayout(tp=config.rollout.tp, expert_parallel=config.rollout.expert_parallel)
    bucket_bytes = int(config.weights.bucket_mib * MIB)
    placement = Placement(rows, layout)  # what it refuses is the trainer's
    places = places_of(config, cuda=cuda)
    try:
        totals = count_totals(placement, ShardMap(rows, engine), places, bucket_bytes)
    except LayoutError as error:
        raise ConfigError(f"rollout.tp={config.rollout.tp}, weights.bucket_mib: {error}") from error
    bandwidth = config.plan.network_gib_per_second
    busiest = max(int(totals.sent_across.max()), int(totals.received_across.max()))
    on_host = not cuda or transport(config, cuda=cuda) == "shared_memory"
    num_windows = min(config.cluster.gpus_per_node if cuda else config.rollout.tp, len(totals.received))
    return WeightSync(
        bytes_per_engine_rank=int(totals.received.max()),
        floor_bytes_per_engine_rank=int(totals.needed.max()),
        buckets=totals.buckets,
        transport=transport(config, cuda=cuda),
        total_bytes=int(totals.received.sum()),
        slots_bytes=min(config.weights.num_buckets, totals.buckets) * bucket_bytes * num_windows if on_host else 0,
        bytes_crossing_hosts=int(totals.sent_across.sum()),
        busiest_sender_bytes=int(totals.sent.max()),
        seconds=busiest / (bandwidth * GIB) if bandwidth is not None and busiest else None,
    )


def places_of(config: Config, *, cuda: bool) -> RankLocations:
    """As a run places its processes. Raises: ConfigError where they do not fit."""
    slots = config.cluster.gpus_per_node
    placement = place(config, on_gpus=cuda, num_engines=config.rollout.num_engines)
    trainers = [(node, rank if cuda else -1) for rank, node in enumerate(placement.ranks)]
    others = count(len(trainers))  # devices that no trainer rank has

    def device(slot: Slot, rank: int) -> int:
        if not cuda:
            return -1
        return next(others) if slot.places is None else slot.node * slots + slot.places[rank]

    engines = [
        (slot.node, device(slot, rank))
        for hosts in placement.engines
        for slot in hosts
        for rank in range(config.rollout.tp // len(hosts))
    ]
    return RankLocations.of(trainers, engines)


def gpu_window_bytes(config: Config, *, cuda: bool) -> int:
    """What a sync keeps on a trainer rank's GPU all the time, at most: the slots of its window, and as many in which
    what it sends to others is packed. Of what vLLM keeps for vllm_rdt nothing is known here."""
    kind = transport(config, cuda=cuda)
    if not cuda or kind in ("shared_memory", "vllm_rdt"):
        return 0
    sends = kind == "network" or num_trainer_ranks(config) > 1
    slots = config.weights.num_buckets * int(config.weights.bucket_mib * MIB)
    return slots * ((kind == "cuda_ipc") + sends)


def transport(config: Config, *, cuda: bool) -> str:
    """How weights reach an engine rank at last: as weights.transport asks, or by what it shares with trainer ranks."""
    if config.weights.transport != "auto":
        return config.weights.transport
    if config.cluster.placement == "colocated":
        return "cuda_ipc" if cuda else "shared_memory"
    return "shared_memory" if config.cluster.nodes == 1 else "network"
