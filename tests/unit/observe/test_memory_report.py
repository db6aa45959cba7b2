"""Memory report of a run: four points of the first complete step, next to the plan."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from mcore_rl.errors import ConfigError
from mcore_rl.observe.memory_report import GIB, POINTS, MemoryReport
from mcore_rl.types import DeviceMemory, Max, Metric

USED = {"asleep": 12, "weights_awake": 40, "updated": 41, "kv_cache_awake": 70}


class Run:
    """Fake run with two GPUs, a trainer rank and an engine rank on each."""

    def __init__(self, planned: Mapping[str, int] | None = None, *, cuda: bool = True) -> None:
        self.cuda, self.planned, self.point, self.num_measured = cuda, planned, "", 0
        self.metrics: dict[str, Metric] = {}
        self.notes: list[str] = []
        self.report = MemoryReport(
            lambda: self.measure(3), lambda: self.measure(0), self.plan, self.metrics.update, self.notes.append
        )

    def measure(self, reserved: int) -> list[DeviceMemory | None]:
        self.num_measured += 1
        if not self.cuda:
            return [None, None]
        used = USED[self.point]
        return [
            DeviceMemory(f"GPU-{number}", (used - number) * GIB, 80 * GIB, (reserved + number) * GIB)
            for number in range(2)
        ]

    def plan(self, gpu_bytes: int) -> Mapping[str, int]:
        assert gpu_bytes == 80 * GIB
        if self.planned is None:
            raise ConfigError("actor.parallel.tp=3 does not divide 8")
        return self.planned

    def pass_points(self, *points: str) -> None:
        for point in points:
            self.point = point
            self.report.at(point)


def test_memory_report_records_four_points_next_to_the_plan_once() -> None:
    run = Run({point: (used - 2) * GIB for point, used in USED.items()})
    run.pass_points(*POINTS)
    assert run.metrics == {
        **{f"memory/{point}_used_bytes": Max(used * GIB) for point, used in USED.items()},
        **{f"memory/{point}_trainer_bytes": Max(4 * GIB) for point in USED},
        **{f"memory/{point}_planned_bytes": Max((used - 2) * GIB) for point, used in USED.items()},
    }
    [note] = run.notes
    assert note == (
        "memory of the fullest of 2 GPUs in GiB: engines asleep 12.0 (trainer 4.0, plan 10.0), "
        "weights awake 40.0 (trainer 4.0, plan 38.0), updated 41.0 (trainer 4.0, plan 39.0), "
        "KV cache awake 70.0 (trainer 4.0, plan 68.0)"
    )
    before = run.num_measured
    run.pass_points(*POINTS)
    assert run.num_measured == before
    assert len(run.notes) == 1


@pytest.mark.parametrize(
    "earlier",
    [
        ["weights_awake", "updated", "kv_cache_awake"],  # the initial weights, before the first step
        ["asleep", "kv_cache_awake"],  # engines sleep and wake up without new weights
        ["asleep", "weights_awake", "updated"],  # two updates without generation between them
    ],
)
def test_memory_report_incomplete_step_is_not_reported(earlier: list[str]) -> None:
    run = Run({})
    run.pass_points(*earlier)
    assert run.metrics == {}
    run.pass_points(*POINTS)
    assert len(run.metrics) == 8
    assert len(run.notes) == 1


def test_memory_report_without_plan_reports_measured_memory() -> None:
    run = Run()
    run.pass_points(*POINTS)
    assert "actor.parallel.tp=3" in run.notes[0]
    assert "KV cache awake 70.0 (trainer 4.0)" in run.notes[1]
    assert not [name for name in run.metrics if "planned" in name]


def test_memory_report_on_cpu_reports_nothing() -> None:
    run = Run(cuda=False)
    run.pass_points(*POINTS)
    assert (run.metrics, run.notes, run.num_measured) == ({}, [], 2)
