"""Bytes of one weight sync, and their lower bound: every engine rank receives its own slices of each tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from mcore_rl.config.schema import ClusterConfig, Config, WeightsConfig
from mcore_rl.planner.engine import GIB, MIB
from mcore_rl.resolved.layout import conversion_errors
from mcore_rl.resolved.placement import RunPlacement, Slot, place
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.slices.senders import RankLocations
from mcore_rl.weights.slices.shard_map import ShardMap
from mcore_rl.weights.slices.totals import count as count_totals
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.placement import Placement
from model_converters.mapping.table import BoundRow


@dataclass(frozen=True)
class WeightSync:
    """Bytes, buckets and seconds of one weight sync.

    `bytes_per_engine_rank`: received by the fullest rank. `floor_bytes_per_engine_rank`: the lower bound, which is the
    size of its weights. `slots_bytes`: staging buffers in one host's memory. `busiest_sender_bytes`: sent to other
    devices. `max_peers`: largest number of other GPUs (on CPU: ranks) with which one exchanges weights. `seconds`: time
    between hosts at plan.network_gib_per_second; None if that is not set or nothing crosses hosts.
    """

    bytes_per_engine_rank: int
    floor_bytes_per_engine_rank: int
    buckets: int
    transport: str
    total_bytes: int
    slots_bytes: int
    bytes_crossing_hosts: int
    busiest_sender_bytes: int
    max_peers: int
    seconds: float | None


def weight_sync(config: Config, rows: Sequence[BoundRow], layout: TrainLayout, *, cuda: bool) -> WeightSync:
    """Count the bytes of one weight sync from the plan that a run would make.

    Raises: ConfigError if the ranks do not fit into the cluster, a bucket is too small for a row or the engine's ranks
    do not divide the model; LayoutError.
    """
    weights, rollout, cluster = config.weights, config.rollout, config.cluster
    engine = EngineLayout(tp=rollout.tp, expert_parallel=rollout.expert_parallel)
    bucket_bytes = int(weights.bucket_mib * MIB)
    placement = Placement(rows, layout)  # outside the block: its errors are about the trainer's layout
    places = place(cluster, rollout, layout.world_size, on_gpus=cuda, num_engines=rollout.num_engines)
    locations = _locations(places, cluster.gpus_per_node, rollout.tp, cuda=cuda)
    with conversion_errors(f"rollout.tp={rollout.tp}, weights.bucket_mib: "):
        totals = count_totals(placement, ShardMap(rows, engine), locations, bucket_bytes)
    bandwidth = config.plan.network_gib_per_second
    # The busiest rank in one direction determines the time: links send and receive at once.
    busiest = max(int(totals.sent_across.max()), int(totals.received_across.max()))
    kind = transport(weights, cluster, cuda=cuda)
    # On GPUs, the other transports stage weights in device memory (staging_bytes).
    on_host = not cuda or kind == "shared_memory"
    num_buffers = min(cluster.gpus_per_node if cuda else rollout.tp, len(totals.received))
    return WeightSync(
        bytes_per_engine_rank=int(totals.received.max()),
        floor_bytes_per_engine_rank=int(totals.needed.max()),
        buckets=totals.buckets,
        transport=kind,
        total_bytes=int(totals.received.sum()),
        slots_bytes=min(weights.num_buckets, totals.buckets) * bucket_bytes * num_buffers if on_host else 0,
        bytes_crossing_hosts=int(totals.sent_across.sum()),
        busiest_sender_bytes=int(totals.sent.max()),
        max_peers=int(totals.peers.max()),
        seconds=busiest / (bandwidth * GIB) if bandwidth is not None and busiest else None,
    )


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
    if not cuda or kind == "shared_memory":
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
