"""Streaming scheduler: each task goes to the least loaded engine and returns once."""

from __future__ import annotations

import gc
import random
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from mcore_rl.runtime.delivery import Chunk
from mcore_rl.runtime.engines import scheduler
from mcore_rl.runtime.engines.balance import EngineKey
from mcore_rl.runtime.engines.process import EngineReport
from mcore_rl.types import DraftCounts, Mean, RolloutResult, Total
from tests.unit.runtime.engines import Begin, Engine, scalars_of
from tests.unit.runtime.streams import Once, begin, finish_all, stream_of, supply, task_of, tickets


@pytest.mark.parametrize("seed", range(5))
def test_begin_never_chooses_a_more_loaded_engine(seed: int) -> None:
    chance = random.Random(seed)
    stream, watch = stream_of(7, seed=seed)
    results = Once()
    loads = dict.fromkeys((engine.process for engine in watch.engines), 0)
    for number in range(200):
        requests, before = chance.randint(1, 5), {process: len(process.given) for process in loads}
        stream.begin(task_of(number, requests), results)
        [chosen] = [process for process in loads if len(process.given) > before[process]]
        assert loads[chosen] == min(loads.values())
        loads[chosen] += requests
        if chance.random() < 0.4:
            watch.wait([], 0)
        for chunk, scalars in results.values():
            loads[cast(Chunk, chunk).parts[0].place.process] -= len(scalars.group_ids)
        results.clear()
        assert stream.running_requests == sum(loads.values())


class CountedEngine(Engine):
    looks = 0

    @property
    def serves(self) -> bool:
        CountedEngine.looks += 1
        return super().serves


def test_begin_does_not_look_at_all_engines() -> None:
    stream, watch = stream_of(512)
    stream.fleet.engines[:] = watch.engines[:] = [CountedEngine(number) for number in range(512)]
    results: dict[int, RolloutResult] = {}
    begin(stream, [8] * 512, results)  # checks the load of every engine
    CountedEngine.looks = 0
    for number in range(1000):
        stream.begin(task_of(number, 1 + number % 3), results)
    assert CountedEngine.looks < 5 * 1000
    loads = [sum(task.num_responses for task in engine.process.given) for engine in watch.engines]
    assert max(loads) - min(loads) <= 3


def test_memory_of_loads_does_not_grow_with_tasks() -> None:
    stream, watch = stream_of(2)
    task, results = task_of(0), cast("dict[int, RolloutResult]", {})

    def blocks_after(count: int) -> int:
        """Return the number of memory blocks after `count` more tasks, with equally many tasks in flight."""
        for number in range(count):
            stream.begin(task, results)
            name = f"engine {number % 2}"
            watch.finish(name, 0)
            watch.wait([], 0)
            results.clear()
            watch.present(name).released.clear()
        gc.collect()
        return sys.getallocatedblocks()

    begin(stream, [1] * 20, results)
    before = blocks_after(200)
    assert blocks_after(1000) - before < 500


def test_one_run_call_per_engine_and_begin_calls_meanwhile() -> None:
    stream, watch = stream_of(2)
    results = Once()
    stream.begin(task_of(0), results)
    stream.begin(task_of(1), results)
    processes = [engine.process for engine in watch.engines]
    assert [(process.runs, process.begins) for process in processes] == [(1, 0), (1, 1)]
    begin(stream, [1] * 4, results)
    assert [(process.runs, process.begins) for process in processes] == [(1, 2), (1, 3)]
    stream.ended([call for call in stream.calls() if isinstance(call, Begin)])
    finish_all(stream, watch)
    assert [process.runs for process in processes] == [2, 2]
    for process in processes:
        assert watch.waiting_call(process)  # exactly one
    assert len(results) == 6


def test_together_sends_tasks_of_an_engine_with_one_call() -> None:
    stream, watch = stream_of(2)
    results = Once()
    begin(stream, [1, 1], results)
    first, second = (engine.process for engine in watch.engines)
    begins = first.begins, second.begins
    with stream.together():
        begin(stream, [3, 1], results)
        with stream.together():
            begin(stream, [1, 1], results)
        assert tickets(watch) == [[0], [1]]
        assert stream.running_requests == 8
    assert tickets(watch) == [[0, 2], [1, 3, 4, 5]]  # the same engines as without `together`
    assert (first.begins, second.begins) == (begins[0] + 1, begins[1] + 1)


def test_task_begun_in_the_callback_goes_with_the_next_run_call() -> None:
    stream, watch = stream_of(2)
    results = Once()
    begin(stream, [1, 1], results)
    stream.attend(lambda: begin(stream, [1, 1], results) and None)
    processes = [engine.process for engine in watch.engines]
    before = [process.begins for process in processes]
    finish_all(stream, watch)
    assert tickets(watch) == [[2], [3]]
    assert [process.runs for process in processes] == [2, 2]
    assert [process.begins for process in processes] == before
    finish_all(stream, watch)
    assert sorted(results) == list(range(4))
    assert stream.running_requests == 2


def test_unreferenced_trajectories_are_released_once_with_the_next_call() -> None:
    stream, watch = stream_of(2)
    results: dict[int, RolloutResult] = {}
    begin(stream, [1] * 4, results)
    finish_all(stream, watch)
    kept = {ticket: cast(Chunk, results[ticket][0]).parts[0].place.key for ticket in results}
    first, second = (engine.process for engine in watch.engines)
    assert [first.released, second.released] == [[], []]
    del results[0], results[3]
    gc.collect()
    begin(stream, [1] * 2, results)
    assert [first.released, second.released] == [[], []]
    finish_all(stream, watch)
    assert [first.released, second.released] == [[kept[0]], [kept[3]]]
    begin(stream, [1] * 2, results)
    finish_all(stream, watch)
    assert [first.released, second.released] == [[kept[0]], [kept[3]]]


def test_idle_fraction_is_the_time_without_busy_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(perf_counter=lambda: now))
    stream, watch = stream_of(2)
    stream.idle_fraction()
    begin(stream, [1] * 6, {})

    def says(name: str, busy_seconds: float) -> None:
        watch.busy_seconds = busy_seconds
        stream.ended([watch.finish(name, 0)])

    def idle(elapsed: float) -> float:
        nonlocal now
        now += elapsed
        mean = stream.idle_fraction()
        assert mean.count == 2 * elapsed
        return mean.total / mean.count

    says("engine 0", 6.0)
    says("engine 1", 2.0)
    assert idle(10.0) == pytest.approx(0.6)
    says("engine 0", 16.0)
    assert idle(10.0) == pytest.approx(0.5)  # no report of engine 1 in this interval
    says("engine 1", 22.0)  # also covers the previous interval
    assert idle(10.0) == pytest.approx(0.5)
    watch.kill("engine 0")
    stream.wait()
    supply(stream)
    begin(stream, [1] * 6, {})
    says("engine 0", 4.0)
    assert idle(10.0) == pytest.approx(0.8)  # busy time of the new process starts at 0
    watch.kill("engine 0")
    stream.wait()
    assert idle(10.0) == 1.0
    supply(stream)
    begin(stream, [1] * 6, {})
    says("engine 0", 1000.0)
    says("engine 1", 1000.0)
    assert idle(10.0) == 0.0


def test_tokens_taken_over_from_journals_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, watch = stream_of(2)
    monkeypatch.setattr(watch, "scalars_of", lambda task: replace(scalars_of(task), tokens_taken_over=5))
    begin(stream, [3, 1, 2], {})
    finish_all(stream, watch)
    assert stream.fleet.take_metrics()["engine/tokens_taken_over"] == Total(15)


def test_ended_requests_make_room_before_their_tasks_end() -> None:
    stream, watch = stream_of(2)
    heard, results = [], Once()
    begin(stream, [4, 4], results)
    stream.attend(lambda: heard.append(stream.running_requests))
    watch.ended_early = 3
    stream.ended([watch.finish("engine 1")])
    assert heard == [5]
    begin(stream, [2], results)
    assert tickets(watch) == [[0], [1, 2]]
    watch.ended_early = 0
    stream.ended([watch.finish("engine 1", 0)])
    assert heard[-1] == stream.running_requests == 6
    finish_all(stream, watch)
    assert stream.running_requests == 0


def test_tasks_of_a_lost_engine_count_in_full_again() -> None:
    stream, watch = stream_of(2)
    results = Once()
    begin(stream, [4, 4], results)
    watch.ended_early = 3
    stream.ended([watch.finish("engine 1")])
    watch.kill("engine 1")
    stream.wait()
    assert stream.running_requests == 8
    supply(stream)
    watch.ended_early = 0
    begin(stream, [1], results)  # the new process has no tasks
    assert tickets(watch) == [[0, 1], [2]]
    finish_all(stream, watch)
    assert stream.running_requests == 0


def test_tokens_carried_over_are_counted_once() -> None:
    stream, _ = stream_of(1)
    begin(stream, [1], {})
    for total in (5, 5, 12):
        stream._take_report(EngineKey(0), EngineReport([], 1, 0, 0.0, total))
    assert stream.fleet.take_metrics()["engine/tokens_carried_over"] == Total(12)


def test_drafts_of_reports_are_counted_once_per_engine() -> None:
    stream, _ = stream_of(1)
    begin(stream, [1], {})
    one, two = DraftCounts.zero(2).with_draft(2, 1), DraftCounts.zero(2).with_draft(2, 1).with_draft(1, 1)
    for key, drafts in ((EngineKey(0), one), (EngineKey(0), one), (EngineKey(0), two), (EngineKey(0, 1), one)):
        stream._take_report(key, EngineReport([], 1, 0, 0.0, 0, drafts))
    metrics = stream.fleet.take_metrics()
    assert metrics["engine/draft_tokens"] == Total(5)
    assert metrics["engine/draft_acceptance_1"] == Mean(3, 3)
    assert metrics["engine/draft_acceptance_2"] == Mean(0, 2)


def test_slots_count_engines_with_weights() -> None:
    stream, watch = stream_of(3, max_restarts=4)
    assert (stream.num_engines, stream.slots) == (3, 24)
    watch.kill("engine 0")
    stream.wait()
    assert stream.slots == 16
    supply(stream)
    assert stream.slots == 24
    for name in ("engine 0", "engine 1", "engine 2"):
        stream.fleet.lose(stream.fleet.engines[int(name[-1])], "lost")
    assert stream.slots == 8  # of restarting engines: with 0 slots, a run would submit nothing and wait forever


def test_rest_waits_until_no_request_runs() -> None:
    stream, watch = stream_of(2)
    begin(stream, [1] * 4, {})
    for engine in watch.engines:
        engine.process.num_running = lambda: None  # type: ignore[method-assign, assignment, return-value]
    answers = [
        [(2, 1), (2, 0)],
        [(1, 0), (2, 0)],  # one task has not arrived there yet, or has ended and was not reported yet
        [(2, 0), (2, 0)],
    ]
    watch.get = lambda calls: answers.pop(0)  # type: ignore[attr-defined]
    stream.rest()
    assert answers == []
    assert watch.waits == 2
