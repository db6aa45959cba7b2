"""What one weight sync moves, and the least possible: on one host buckets of whole tensors, of which every engine rank
copies its own slices; between hosts these slices alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError
from mcore_rl.weights.plan import plan_buckets
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.slices.needs import Needs
from mcore_rl.weights.slices.routes import Places
from mcore_rl.weights.slices.totals import count
from model_converters.errors import LayoutError
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.placement import Placement
from model_converters.mapping.plan import export_plan
from model_converters.mapping.table import BoundRow

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class WeightSync:
    """Of one sync.

    `bytes_per_engine_rank`: what the fullest rank copies or receives; `floor_bytes_per_engine_rank`: what it keeps.
    `slots_bytes`: memory of the ring, per host. `busiest_sender_bytes`: to other devices. `seconds`: of what crosses
    hosts, at plan.network_gib_per_second; None without it.
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


def weight_sync(
    config: Config, rows: Sequence[BoundRow], layout: TrainLayout, engine_weights_bytes: int, *, cuda: bool
) -> WeightSync:
    """Raises: ConfigError for buckets that are too small for a row, or an engine that does not divide; LayoutError."""
    if transport(config) == "network":
        return _own_slices(config, rows, layout, cuda=cuda)
    # Engines do not load multi-token prediction.
    served = [bound for bound in rows if bound.row.place != "mtp"]
    plans = export_plan(served, layout)
    spec = plan_buckets(plans, int(config.weights.bucket_mib * MIB), config.weights.num_buckets)
    written = [0] * layout.world_size
    for plan in plans:
        for piece in plan.pieces:
            written[piece.rank] += prod(plan.piece_shape(piece)) * plan.dtype.itemsize
    return WeightSync(
        bytes_per_engine_rank=engine_weights_bytes,
        floor_bytes_per_engine_rank=engine_weights_bytes,
        buckets=spec.num_buckets,
        transport=transport(config),
        total_bytes=spec.total_bytes,
        slots_bytes=spec.slot_bytes * spec.num_slots,
        bytes_crossing_hosts=0,
        busiest_sender_bytes=max(written),
        seconds=None,
    )


def _own_slices(config: Config, rows: Sequence[BoundRow], layout: TrainLayout, *, cuda: bool) -> WeightSync:
    engine = EngineLayout(tp=config.rollout.tp, expert_parallel=config.rollout.expert_parallel)
    bucket_bytes = int(config.weights.bucket_mib * MIB)
    try:
        needs = Needs(rows, engine)
        totals = count(Placement(rows, layout), needs, _places(config, layout.world_size, cuda=cuda), bucket_bytes)
    except LayoutError as error:
        raise ConfigError(f"rollout.tp={config.rollout.tp}, weights.bucket_mib: {error}") from error
    bandwidth = config.plan.network_gib_per_second
    busiest = max(int(totals.sent_across.max()), int(totals.received_across.max()))
    return WeightSync(
        bytes_per_engine_rank=int(totals.received.max()),
        floor_bytes_per_engine_rank=int(totals.needed.max()),
        buckets=totals.buckets,
        transport="network",
        total_bytes=int(totals.received.sum()),
        slots_bytes=config.weights.num_buckets * bucket_bytes * min(config.cluster.gpus_per_node, len(totals.received)),
        bytes_crossing_hosts=int(totals.sent_across.sum()),
        busiest_sender_bytes=int(totals.sent.max()),
        seconds=None if bandwidth is None else busiest / (bandwidth * GIB),
    )


def _places(config: Config, num_trainer_ranks: int, *, cuda: bool) -> Places:
    """Consecutive ranks fill a host; colocated engine ranks are on the trainer's devices, others behind them."""
    slots = config.cluster.gpus_per_node
    first = 0 if config.cluster.placement == "colocated" else num_trainer_ranks
    num_engine_ranks = config.rollout.num_engines * config.rollout.tp
    devices = [
        (slot // slots, slot if cuda else -1) for slot in range(max(num_trainer_ranks, first + num_engine_ranks))
    ]
    return Places.of(devices[:num_trainer_ranks], devices[first : first + num_engine_ranks])


def transport(config: Config) -> str:
    """Shared memory within one host; what crosses hosts does not exist yet and is named so that a plan can say it."""
    return "shared_memory" if config.cluster.nodes == 1 else "network"
