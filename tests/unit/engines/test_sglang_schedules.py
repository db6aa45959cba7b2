"""Order in which SGLang's batches are launched and their results processed."""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from mcore_rl.engines.sglang.schedules import BatchSchedule, OverlapSchedule


@dataclass
class FakeRequest:
    """Request that finishes when `left` results have been processed."""

    left: int

    def finished(self) -> bool:
        return self.left <= 0


@dataclass
class FakeBatch:
    number: int
    reqs: list[FakeRequest]
    sampling_info: Any

    def copy(self) -> FakeBatch:
        return replace(self, reqs=list(self.reqs))


@dataclass
class FakeScheduler:
    """SGLang's scheduler without a model. It removes finished requests when it chooses a batch, and does not know in
    advance that a request finishes, as with a token that ends the response."""

    running_batch: list[FakeRequest]
    result_queue: deque[Any] = field(default_factory=deque)
    last_batch: FakeBatch | None = None
    enable_overlap: bool = True
    enable_skip_finishing_decode: bool = False
    moves: list[str] = field(default_factory=list)
    batches: int = 0
    penalties: bool = False

    def get_next_batch_to_run(self, running_batch: list[FakeRequest], last_batch: FakeBatch | None) -> Any:
        running = [request for request in running_batch if not request.finished()]
        self.batches += bool(running)
        info = SimpleNamespace(penalizer_orchestrator=SimpleNamespace(is_required=self.penalties))
        batch = FakeBatch(self.batches, running, info) if running else None
        return SimpleNamespace(running_batch=running, batch_to_run=batch)

    def run_batch(self, batch: FakeBatch) -> str:
        self.moves.append(f"run {batch.number}")
        return f"result {batch.number}"

    def _apply_war_barrier(self) -> None:
        self.moves.append("barrier")

    def process_batch_result(self, batch: FakeBatch, result: str) -> None:
        assert result == f"result {batch.number}"
        self.moves.append(result)
        for request in batch.reqs:
            request.left -= 1

    def on_idle(self) -> None:
        self.moves.append("idle")


def moves(scheduler: FakeScheduler) -> list[str]:
    taken, scheduler.moves = scheduler.moves, []
    return taken


def make(kind: type[BatchSchedule], *lengths: int) -> tuple[BatchSchedule, FakeScheduler]:
    scheduler: Any = FakeScheduler([FakeRequest(length) for length in lengths])
    return kind(scheduler), scheduler


def test_batch_schedule_processes_each_batch_at_once() -> None:
    schedule, scheduler = make(BatchSchedule, 2)
    assert [schedule.run(), moves(scheduler)] == [False, ["run 1", "result 1"]]
    assert not schedule.drain()
    assert schedule.run()
    assert not schedule.is_idle
    assert not schedule.run()
    assert schedule.is_idle
    assert moves(scheduler) == ["run 2", "result 2", "idle"]
    assert not scheduler.enable_skip_finishing_decode


def test_overlap_schedule_processes_results_after_the_next_launch() -> None:
    schedule, scheduler = make(OverlapSchedule, 2, 4)
    assert scheduler.enable_skip_finishing_decode
    assert not schedule.run()
    assert moves(scheduler) == ["run 1", "barrier", "run 2", "barrier", "result 1"]
    assert schedule.run(), "the first request finishes"
    assert moves(scheduler) == ["run 3", "barrier", "result 2"]
    assert not schedule.run(), "it was part of batch 3, but has finished before"
    assert moves(scheduler) == ["run 4", "barrier", "result 3"]
    assert schedule.run()
    assert not schedule.is_idle, "batch 5 is in flight"
    assert not schedule.run()
    assert schedule.is_idle
    assert moves(scheduler) == ["run 5", "barrier", "result 4", "result 5"]
    assert not schedule.run()
    assert moves(scheduler) == ["idle"]


def test_overlap_schedule_with_penalties_processes_results_first() -> None:
    schedule, scheduler = make(OverlapSchedule, 3)
    scheduler.penalties = True
    assert not schedule.run()
    assert moves(scheduler) == ["run 1", "barrier", "result 1", "run 2", "barrier"]
    assert not schedule.run()
    assert moves(scheduler) == ["result 2", "run 3", "barrier"]
    assert schedule.run()
    assert moves(scheduler) == ["result 3"]


def test_overlap_schedule_drain_leaves_no_batch_in_flight() -> None:
    schedule, scheduler = make(OverlapSchedule, 9)
    schedule.run()
    moves(scheduler)
    assert [schedule.drain(), moves(scheduler)] == [True, ["result 2"]]
    assert [schedule.drain(), moves(scheduler)] == [False, []]
    assert not schedule.run()
    assert moves(scheduler) == ["run 3", "barrier", "run 4", "barrier", "result 3"]


def test_overlap_schedule_drained_restores_overlap_after_an_error() -> None:
    schedule, scheduler = make(OverlapSchedule, 9)
    with contextlib.suppress(KeyError), schedule.drained():
        assert not scheduler.enable_overlap
        raise KeyError
    assert scheduler.enable_overlap
