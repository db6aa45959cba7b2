"""The plan's memory of one GPU at the points that a run measures (observe.memory_report)."""

from __future__ import annotations

from collections.abc import Sequence

from mcore_rl.planner.engine import EngineRank
from mcore_rl.planner.phases import RESERVE_BYTES, Phases


def planned_points(phases: Sequence[Phases], engine: EngineRank) -> dict[str, int]:
    """Return the bytes on the fullest GPU by point, with the reserve for CUDA contexts and libraries, which the device
    counts as used.

    phases: memory of each GPU, which it shares with an engine rank.
    """
    generate, sync = (max(each.by_name[name] for each in phases) for name in ("generate", "sync"))
    points = {
        "asleep": generate - engine.total_bytes + engine.asleep_bytes,
        "weights_awake": sync,
        "updated": sync,
        "kv_cache_awake": generate,
    }
    return {point: planned + RESERVE_BYTES for point, planned in points.items()}
