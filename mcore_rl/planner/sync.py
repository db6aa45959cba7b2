"""What one weight sync moves: the buckets of the very plan that the run will follow, and the least possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_rl.config.schema import Config
from mcore_rl.weights.plan import plan_buckets
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.plan import export_plan
from model_converters.mapping.table import BoundRow

MIB = 2**20


@dataclass(frozen=True)
class WeightSync:
    """Of one sync.

    `bytes_per_engine_rank`: what a rank copies out of the buckets. Where all of them are in place at once it takes its
    own slices, else a bucket is copied whole before the next is written. `floor_bytes_per_engine_rank`: its own
    slices. `slots_bytes`: host memory of the ring, per host.
    """

    bytes_per_engine_rank: int
    floor_bytes_per_engine_rank: int
    buckets: int
    transport: str
    total_bytes: int
    slots_bytes: int
    mapped: bool


def weight_sync(config: Config, rows: Sequence[BoundRow], layout: TrainLayout, engine_weights_bytes: int) -> WeightSync:
    """Raises: ConfigError for buckets that are too small for a row; LayoutError."""
    # Engines do not load multi-token prediction.
    served = [bound for bound in rows if bound.row.place != "mtp"]
    spec = plan_buckets(export_plan(served, layout), int(config.weights.bucket_mib * MIB), config.weights.num_buckets)
    total = spec.total_bytes
    return WeightSync(
        bytes_per_engine_rank=engine_weights_bytes if spec.mapped else max(total, engine_weights_bytes),
        floor_bytes_per_engine_rank=engine_weights_bytes,
        buckets=spec.num_buckets,
        transport=transport(config),
        total_bytes=total,
        slots_bytes=spec.slot_bytes * spec.num_slots,
        mapped=spec.mapped,
    )


def transport(config: Config) -> str:
    """Shared memory within one host; what crosses hosts does not exist yet and is named so that a plan can say it."""
    return "shared_memory" if config.cluster.nodes == 1 else "network"
