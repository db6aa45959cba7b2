"""Bytes of one weight sync, and their lower bound: every engine rank receives its own slices of each tensor."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count

import numpy as np

from mcore_rl.config.rules.device_sharing import shares_device
from mcore_rl.config.schema import ClusterConfig, Config, WeightsConfig
from mcore_rl.planner.engine import GIB, MIB
from mcore_rl.resolved.layout import conversion_errors
from mcore_rl.resolved.placement import RunPlacement, Slot, place
from mcore_rl.weights.engine_config import engine_layout
from mcore_rl.weights.frozen import RowKey
from mcore_rl.weights.slices.routes import RouteMap
from mcore_rl.weights.slices.senders import ELSEWHERE, RankLocations
from mcore_rl.weights.slices.shard_map import IntArray, ShardMap
from mcore_rl.weights.slices.totals import Totals
from mcore_rl.weights.slices.totals import count as count_totals
from mcore_rl.weights.transports.files.writer import KEPT_TRANSFERS
from mcore_rl.weights.transports.topology import FILES, SHARED_MEMORY
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.placement import Placement
from model_converters.mapping.table import BoundRow

ON_HOST = (SHARED_MEMORY, FILES)
"""Transports that stage weights in host memory also if the ranks have GPUs."""


@dataclass(frozen=True, kw_only=True)
class SyncAmounts:
    """Bytes, buckets and seconds of one sync.

    `bytes_per_engine_rank`: received by the fullest rank. `floor_bytes_per_engine_rank`: the lower bound, which is the
    size of its weights in the sync. `total_bytes`: received by all engine ranks. `busiest_sender_bytes`: sent to other
    devices. `seconds`: time between hosts at plan.network_gib_per_second; None if that is not set or nothing crosses
    hosts.
    """

    bytes_per_engine_rank: int
    floor_bytes_per_engine_rank: int
    buckets: int
    total_bytes: int
    bytes_crossing_hosts: int
    busiest_sender_bytes: int
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class WeightSync(SyncAmounts):
    """A sync of all weights, as after the start of an engine, and the memory of all syncs.

    `later`: syncs without the frozen weights, which training never changes and the engines keep (weights/frozen.py);
    None if every sync contains all weights. `slots_bytes`: staging buffers in one host's memory. `max_peers`: largest
    number of other GPUs (on CPU: ranks) with which one exchanges weights. `directory_bytes`: largest size of the files
    in weights.directory. `copies_bytes`: memory of the host with most copies of weights that cross hosts, with
    weights.delta.
    """

    transport: str
    slots_bytes: int
    max_peers: int
    directory_bytes: int = 0
    copies_bytes: int = 0
    later: SyncAmounts | None = None

    @property
    def steady(self) -> SyncAmounts:
        """Every sync after the first one."""
        return self.later or self


def weight_sync(
    config: Config,
    rows: Sequence[BoundRow],
    layout: TrainLayout,
    *,
    cuda: bool,
    frozen: Collection[RowKey] = (),
) -> WeightSync:
    """Count the bytes of one weight sync from the plan that a run would make. `frozen`: rows that training never
    changes.

    Raises: ConfigError if the ranks do not fit into the cluster, a bucket is too small for a row or the engine's ranks
    do not divide the model; LayoutError.
    """
    weights, rollout, cluster = config.weights, config.rollout, config.cluster
    engine = engine_layout(rollout)
    bucket_bytes = int(weights.bucket_mib * MIB)
    placement = Placement(rows, layout)  # outside the block: its errors are about the trainer's layout
    places = place(cluster, rollout, layout.world_size, on_gpus=cuda, num_engines=rollout.num_engines)
    locations = _locations(places, cluster.gpus_per_node, rollout.tp, cuda=cuda)
    kind = transport(weights, cluster, cuda=cuda)
    # One file serves the same rank of all engines, so the files are those of one engine.
    readers, routed = (rollout.num_engines, _of_files(locations, rollout.tp)) if kind == FILES else (1, locations)
    copied = _of_buffers(routed, rollout.tp) if shares_host_memory(weights, cuda=cuda) else routed
    with conversion_errors(f"rollout.tp={rollout.tp}, weights.bucket_mib: "):
        shard_map = ShardMap(rows, engine, rollout.quantization, rollout.quantization_group, frozen)
        route_map = RouteMap(placement, shard_map, routed)
        totals = of_copies = count_totals(route_map, bucket_bytes)
        of_later = None
        if frozen and not shares_device(cluster, config.actor.offload, cuda=cuda):
            of_later = count_totals(route_map, bucket_bytes, frozen=False)
        if weights.delta and copied is not routed:
            of_copies = count_totals(RouteMap(placement, shard_map, copied), bucket_bytes)
    # On GPUs, the other transports stage weights in device memory (staging_bytes).
    on_host = not cuda or kind in ON_HOST
    num_buffers = min(cluster.gpus_per_node if cuda else rollout.tp, len(totals.received))
    fetched = 0
    if kind == FILES:  # every engine rank keeps a whole update
        num_buffers = int(np.bincount(locations.engine_hosts).max())
        fetched = _most_on_a_host((locations.engine_hosts, _of_all_engines(totals.received, locations)))
    slots_bytes = min(weights.num_buckets, totals.buckets) * bucket_bytes * num_buffers + fetched
    amounts = partial(_amounts, files=kind == FILES, readers=readers, bandwidth=config.plan.network_gib_per_second)
    # All kept transfers but the first one of the run are later ones.
    written = [totals, *[of_later or totals] * (KEPT_TRANSFERS - 1)] if kind == FILES else []
    return WeightSync(
        **asdict(amounts(totals)),
        transport=kind,
        slots_bytes=slots_bytes if on_host else 0,
        max_peers=0 if kind == FILES else int(totals.peers.max()),
        directory_bytes=sum(int(each.sent_across.sum()) for each in written),
        copies_bytes=copies_bytes(of_copies, locations if kind == FILES else copied) if weights.delta else 0,
        later=None if of_later is None else amounts(of_later),
    )


def _amounts(totals: Totals, *, files: bool, readers: int, bandwidth: float | None) -> SyncAmounts:
    """Return the amounts of a sync. readers: engines that read each file. bandwidth: in GiB per second."""
    crossing = int(totals.sent_across.sum())
    # The busiest rank in one direction determines the time: links send and receive at once.
    busiest = max(int(totals.sent_across.max()), int(totals.received_across.max()))
    return SyncAmounts(
        bytes_per_engine_rank=int(totals.received.max()),
        floor_bytes_per_engine_rank=int(totals.needed.max()),
        buckets=totals.buckets,
        total_bytes=int(totals.received.sum()) * readers,
        bytes_crossing_hosts=crossing * (1 + readers) if files else crossing,
        busiest_sender_bytes=int(totals.sent.max()),
        seconds=busiest / (bandwidth * GIB) if bandwidth is not None and busiest else None,
    )


def shares_host_memory(weights: WeightsConfig, *, cuda: bool) -> bool:
    """Return whether engines on a host with trainer ranks read the same staging buffers (Topology.buffers). GPUs have
    buffers of their own unless host memory is required."""
    return weights.transport == SHARED_MEMORY or (weights.transport == "auto" and not cuda)


def _of_buffers(locations: RankLocations, num_ranks: int) -> RankLocations:
    """Keep the first of the engines, of `num_ranks` ranks each, that read the same staging buffers: messages arrive
    there once for all of them."""
    hosts = locations.engine_hosts.reshape(-1, num_ranks)
    with_trainers = set(locations.trainer_hosts.tolist())
    first: dict[tuple[int, ...], int] = {}
    kept = [
        engine for engine, own in enumerate(map(tuple, hosts.tolist()))
        if not with_trainers.issuperset(own) or first.setdefault(own, engine) == engine
    ]  # fmt: skip
    devices = locations.engine_devices.reshape(-1, num_ranks)
    return replace(locations, engine_hosts=hosts[kept].reshape(-1), engine_devices=devices[kept].reshape(-1))


def copies_bytes(totals: Totals, locations: RankLocations) -> int:
    """Return the bytes that the ranks of one host, the one with most, send to and receive from other hosts."""
    received = _of_all_engines(totals.received_across, locations)
    return _most_on_a_host((locations.trainer_hosts, totals.sent_across), (locations.engine_hosts, received))


def _of_all_engines(num_bytes: IntArray, locations: RankLocations) -> IntArray:
    """Repeat the bytes of one engine's ranks for all engines, which read the same files."""
    return np.tile(num_bytes, len(locations.engine_hosts) // len(num_bytes))


def _most_on_a_host(*groups: tuple[IntArray, IntArray]) -> int:
    """Return the bytes of the host with most of them. groups: hosts of ranks, and bytes of the same ranks."""
    hosts, num_bytes = (np.concatenate(arrays) for arrays in zip(*groups, strict=True))
    return int(np.bincount(hosts, weights=num_bytes).max())


def _of_files(locations: RankLocations, num_ranks: int) -> RankLocations:
    """Return the locations of the trainer ranks, and of the `num_ranks` sets of files that they write."""
    trainers = zip(locations.trainer_hosts.tolist(), locations.trainer_devices.tolist(), strict=True)
    return RankLocations.of([*trainers], [ELSEWHERE] * num_ranks)


def _locations(placement: RunPlacement, slots: int, tp: int, *, cuda: bool) -> RankLocations:
    """Number the hosts and devices of a run with `slots` devices per node."""
    trainers = [(node, rank if cuda else -1) for rank, node in enumerate(placement.ranks)]
    others = count(len(trainers))  # numbers of devices without a trainer rank

    def device(slot: Slot, rank: int) -> int:
        if not cuda:
            return -1
        return next(others) if slot.places is None else slot.node * slots + slot.places[rank]

    engines = [
        (slot.node, device(slot, rank))
        for hosts in placement.engines
        for slot in hosts
        for rank in range(tp // len(hosts))
    ]
    return RankLocations.of(trainers, engines)


def staging_bytes(weights: WeightsConfig, cluster: ClusterConfig, num_ranks: int, *, cuda: bool) -> int:
    """Return an upper bound of the staging buffers that weight syncs keep on the GPU of each of `num_ranks` trainer
    ranks.

    A rank has slots for the weights that arrive and as many for the slices that it sends to other ranks.
    """
    kind = transport(weights, cluster, cuda=cuda)
    if not cuda or kind in ON_HOST:
        return 0
    # A single trainer rank has its engine rank on the same GPU and sends nothing to other ranks.
    sends = kind == "network" or num_ranks > 1
    slots = weights.num_buckets * int(weights.bucket_mib * MIB)
    return slots * ((kind == "cuda_ipc") + sends)


def transport(weights: WeightsConfig, cluster: ClusterConfig, *, cuda: bool) -> str:
    """Return how weights reach an engine rank: weights.transport, or the choice of auto."""
    if weights.transport != "auto":
        return weights.transport
    if cluster.placement == "colocated":
        return "cuda_ipc" if cuda else "shared_memory"
    # NCCL also moves weights between the GPUs of one node.
    return "network" if cuda or cluster.nodes > 1 else "shared_memory"
