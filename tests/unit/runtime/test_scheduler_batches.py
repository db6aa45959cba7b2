"""Scheduler in batches: every result is returned once, in the order of the tasks, also if engines die."""

from __future__ import annotations

import contextlib
import gc
import os
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from mcore_rl.errors import WorkerDiedError
from mcore_rl.rollout.tasks import GivenUp
from mcore_rl.runtime.delivery import Chunk
from mcore_rl.runtime.engines.process import EngineReport
from mcore_rl.runtime.engines.scheduler import Scheduler
from mcore_rl.runtime.phases import Phase, Stages
from mcore_rl.types import RolloutTask, SamplingOptions, Total
from tests.unit.runtime.engines import SAMPLES, Call, GiveUp, Watch, groups, scalars_of, scheduler_over, tasks_of


class DyingWatch(Watch):
    """Ends the oldest call in each wait: the oldest task of its engine is finished, the others have started. `dying[n]`
    are the processes that die in wait n, with their calls. With a seed, random calls end in random order."""

    attendant: Scheduler

    def __init__(self, dying: dict[int, list[str]], seed: int | None = None) -> None:
        super().__init__()
        self.dying, self.waits = dying, 0
        self.random = None if seed is None else random.Random(seed)

    def get(self, results: list[object]) -> list[object]:
        return results

    def wait(self, calls: Sequence[object], num_returns: int) -> tuple[list[object], list[object]]:
        self.waits += 1
        for name in self.dying.pop(self.waits, []):
            self.dead[id(self.present(name))] = f"{name} died: killed"
        own = self.attendant.calls()
        count = 1 if self.random is None else self.random.randint(1, len(own))
        self.attendant.ended(own[:1] if self.random is None else self.random.sample(own, count))
        return list(calls), []

    def value(self, call: Call) -> EngineReport | GivenUp:
        if call.process_id in self.dead:
            raise WorkerDiedError("a process died")
        process = self.process(call.process_id)
        if isinstance(call, GiveUp):
            return process.answer(call.free)
        ended, process.left = process.left[:1], process.left[1:]
        process.begun = len(process.given)
        report = [(task, key, scalars_of(process.given[key])) for task, key in ended]
        for _, key in ended:
            record(process.given[key])
        requests = sum(process.given[key].num_responses for _, key in process.left)
        return EngineReport(report, process.received, requests, float(call.number), 0)


def record(task: RolloutTask) -> None:
    """Write the task's records if the test has a directory for them."""
    if task.records is not None and os.path.isabs(task.records):
        lines = [task.request_id(response) + "\n" for response in range(*task.span)]
        Path(task.records).write_text("".join(lines))


def pool_of(
    num_engines: int, dying: dict[int, list[str]] | None = None, *, seed: int | None = None, **options: Any
) -> tuple[Scheduler, DyingWatch]:
    watch = DyingWatch(dying or {}, seed)
    return scheduler_over(watch, num_engines, **options), watch


ALL = [[i] * SAMPLES for i in range(12)]


@pytest.mark.parametrize("dying", [{}, {2: ["engine 0"], 6: ["engine 2"]}])
def test_run_returns_results_in_task_order_despite_deaths(dying: dict[int, list[str]]) -> None:
    losses = sum(map(len, dying.values()))
    pool, _ = pool_of(3, dict(dying), steals=False)  # tasks stay whole, since they have no records
    pool.fleet.version = 5
    results = pool.run(tasks_of(12))
    assert groups(results) == ALL
    assert {cast(Chunk, chunk).task.version for chunk, _ in results} == {5}
    living = {engine.producer for engine in pool.fleet.engines}
    assert {cast(Chunk, chunk).parts[0].place.producer for chunk, _ in results} <= living
    restarts = pool.fleet.take_metrics()["engine/restarts"]
    assert restarts == Total(losses)
    assert all(engine.has_weights for engine in pool.fleet.engines) == (losses == 0)


def test_run_waits_for_the_last_engine_and_supplies_it() -> None:
    pool, watch = pool_of(1, {3: ["engine 0"], 9: ["engine 0"]})
    assert groups(pool.run(tasks_of(12))) == ALL
    assert [len(engine.all) for engine in watch.engines] == [3]
    assert pool.fleet.engines[0].has_weights


def test_run_after_too_many_losses_raises_reason_and_key() -> None:
    said: list[str] = []
    pool, _ = pool_of(2, {1: ["engine 0"], 2: ["engine 1"]}, max_restarts=1, note=said.append)
    with pytest.raises(WorkerDiedError, match=r"engine 1 died: killed \(rollout\.max_engine_restarts=1\)"):
        pool.run(tasks_of(12))
    assert said == ["warning: engine 0 died: killed; it starts again (1 of 1 times)"]


def test_restarted_engine_does_not_release_keys_of_its_predecessor() -> None:
    pool, watch = pool_of(1, {1: ["engine 0"]})
    results = pool.run(tasks_of(2))
    first = [cast(Chunk, chunk).parts[0].place.key for chunk, _ in results]
    del results
    gc.collect()
    pool.run(tasks_of(1))
    before, after = watch.engines[0].all
    assert (before.released, sorted(after.released)) == ([], sorted(first))


def task_of(number: int, directory: Path, num_groups: int = 3, samples: int = 4) -> RolloutTask:
    rows = np.arange(num_groups * number, num_groups * (number + 1))
    return RolloutTask("train", rows, rows, samples, SamplingOptions(8), 1, str(directory / f"part_{number}"))


@pytest.mark.parametrize("seed", range(40))
def test_run_with_steals_and_deaths_joins_pieces_in_order(seed: int, tmp_path: Path) -> None:
    """Calls end in random order; up to three engines die."""
    chance = random.Random(seed)
    dying = {chance.randrange(1, 25): [f"engine {chance.randrange(3)}"] for _ in range(seed % 4)}
    pool, watch = pool_of(3, dying, slots_per_engine=100, seed=seed)
    tasks = [task_of(number, tmp_path) for number in range(14)]
    results = pool.run(tasks)
    assert groups(results) == [np.repeat(task.group_ids, 4).tolist() for task in tasks]
    for task, (chunk, _) in zip(tasks, results, strict=True):
        lines = Path(str(task.records)).read_text().splitlines()
        assert lines == [task.request_id(response) for response in range(12)]
        parts = cast(Chunk, chunk).parts
        assert [0, *(part.last for part in parts)] == [*(part.first for part in parts), 12]
        for part in parts:  # the engine keeps exactly these responses
            process = next(p for engine in watch.engines for p in engine.all if p is part.place.process)
            assert process.given[part.place.key].span == (part.first, part.last)
    living = {engine.producer for engine in pool.fleet.engines}
    assert {part.place.producer for chunk, _ in results for part in cast(Chunk, chunk).parts} <= living
    assert len(list(tmp_path.iterdir())) == len(tasks)


def test_run_waits_for_the_answers_to_its_steals(tmp_path: Path) -> None:
    """The engine's answer to the steal comes last, after the end of its task."""
    pool, watch = pool_of(2, slots_per_engine=120)
    pool.run([task_of(number, tmp_path) for number in range(2)])
    processes = [process for engine in watch.engines for process in engine.all]
    assert sum(process.asked for process in processes) > 0
    assert all(process.asked == process.answers for process in processes)


def test_stolen_requests_are_counted_and_renewed_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task has a piece per engine: reading all pieces at the end of each would be quadratic."""
    pool, watch = pool_of(3, slots_per_engine=120, seed=1)
    reads, of_task = list[int](), pool._balance.of_task
    monkeypatch.setattr(pool._balance, "of_task", lambda task: reads.append(task) or of_task(task))
    results = pool.run([task_of(number, tmp_path, num_groups=6) for number in range(10)])
    assert sorted(reads) == list(range(10))
    assert cast(Total, pool.fleet.take_metrics()["engine/requests_stolen"]).value > 0
    chunks = [cast(Chunk, chunk) for chunk, _ in results]
    producers = {part.place.producer for chunk in chunks for part in chunk.parts}
    assert len(producers) > 1
    lost = max(producers)
    watch.dead[id(watch.engines[int(lost[-1])].process)] = f"{lost} died: killed"
    before = [part for chunk in chunks for part in chunk.parts]
    assert pool.renew(chunks)
    for chunk in chunks:
        assert [0, *(part.last for part in chunk.parts)] == [*(part.first for part in chunk.parts), 24]
        assert all(one.last == other.first for one, other in pairwise(chunk.parts))
        for part in chunk.parts:
            assert part.place.producer != lost
            assert part in before or part.place.process.given[part.place.key].records is None


class Turns:
    """Fake phases of a shared device; records the moves."""

    def __init__(self, pool: Scheduler, watch: DyingWatch) -> None:
        self.pool, self.watch, self.moves = pool, watch, list[str]()
        pool.stages, pool.supply = Stages(phases=cast(Any, self)), self.supply
        pool.fleet.sleep, pool.fleet.wake_up = self.sleep, self.wake_up  # type: ignore[method-assign]
        pool.fleet.make_room = self.make_room

    def sleep(self, keep_weights: bool) -> int:
        self.pool.fleet.settle()
        self.moves.append(f"sleep {keep_weights}")
        self.pool.fleet.awake = frozenset()
        return 0

    def wake_up(self, part: str) -> None:
        self.moves.append(f"wake_up {part}")
        self.pool.fleet.awake |= {part}

    def enter(self, phase: Phase) -> None: ...

    @contextlib.contextmanager
    def interrupted(self) -> Iterator[None]:
        yield
        self.pool.fleet.sleep(keep_weights=False)
        self.moves.append("trainer state returns")

    def make_room(self) -> None:
        for engine in self.watch.engines:  # no rank fetches from a stopped engine any more
            assert id(engine.process) not in self.watch.dead or engine.process in engine.killed
        self.moves.append("trainer state leaves")

    def supply(self) -> None:
        self.pool.fleet.wake_up("weights")
        self.pool.fleet.mark_supplied(self.pool.fleet.engines)
        self.pool.fleet.wake_up("kv_cache")


@pytest.mark.parametrize("before_sleep", [False, True])
def test_renew_while_engines_sleep_wakes_them_and_returns_devices(before_sleep: bool) -> None:
    """The engine is lost before or after the others sleep."""
    pool, watch = pool_of(2)
    turns = Turns(pool, watch)
    chunks = [cast(Chunk, chunk) for chunk, _ in pool.run(tasks_of(4))]
    lost = watch.present("engine 0")
    if before_sleep:
        watch.dead[id(lost)] = "engine 0 did not answer for 20 s"
    pool.fleet.sleep(keep_weights=False)
    if not before_sleep:
        assert not pool.renew(chunks)
        watch.dead[id(lost)] = "engine 0 did not answer for 20 s"
    turns.moves.clear()
    assert pool.renew(chunks)
    leaves = [] if before_sleep else ["trainer state leaves"]
    assert turns.moves == [*leaves, "wake_up weights", "wake_up kv_cache", "sleep False", "trainer state returns"]
    assert pool.fleet.num_restarts == 1
    assert watch.present("engine 0").sleeps == (0 if before_sleep else 1)
    assert watch.present("engine 1").sleeps == 0
    producers = {engine.producer for engine in pool.fleet.engines}
    assert {part.place.producer for chunk in chunks for part in chunk.parts} <= producers
    assert not pool.renew(chunks)


def test_renew_while_engines_sleep_without_turns_makes_nothing() -> None:
    pool, watch = pool_of(2)
    chunks = [cast(Chunk, chunk) for chunk, _ in pool.run(tasks_of(4))]
    pool.fleet.sleep(keep_weights=False)
    watch.dead[id(watch.present("engine 0"))] = "engine 0 died: killed"
    assert not pool.renew(chunks)


def test_retry_on_engine_loss_repeats_a_call_that_replaced_it() -> None:
    """Example: an engine that grades the whole step dies."""
    pool, watch = pool_of(2)
    calls: list[str] = []

    def call() -> str:
        calls.append("call")
        if len(calls) == 1:
            watch.dead[id(watch.present("engine 0"))] = "engine 0 died: killed"
            pool.fleet.reap_failed()
            raise WorkerDiedError("a process failed")
        return "graded"

    assert pool.fleet.retry_on_engine_loss(call) == "graded"
    assert pool.fleet.num_restarts == 1
