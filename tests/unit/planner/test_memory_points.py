"""The plan's memory at the points that a run measures, calculated by hand."""

from __future__ import annotations

from mcore_rl.observe.memory_report import POINTS
from mcore_rl.planner.engine import ASLEEP_BYTES, EngineRank
from mcore_rl.planner.memory_points import planned_points
from mcore_rl.planner.phases import RESERVE_BYTES, Phases


def test_planned_points_describe_the_fullest_gpu() -> None:
    engine = EngineRank(
        weights_bytes=1000,
        workspace_bytes=200,
        kv_cache_bytes=3900,
        kv_bytes_per_token=1,
        sequences=9,
        graphs_bytes=100,
    )
    asleep = 100 + ASLEEP_BYTES
    ranks = [
        Phases({"generate": 5100 + asleep + state, "update": 9000, "sync": 1000 + asleep + state}, 0)
        for state in (7, 30)
    ]
    points = planned_points(ranks, engine)
    assert list(points) == list(POINTS)
    assert {point: planned - RESERVE_BYTES for point, planned in points.items()} == {
        "asleep": asleep + 30,
        "weights_awake": asleep + 1030,
        "updated": asleep + 1030,
        "kv_cache_awake": asleep + 5130,
    }
