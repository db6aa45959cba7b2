"""Tasks of a pool whose engines die: every result comes, once, in the order of the tasks."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

from mcore_rl.errors import WorkerDiedError
from mcore_rl.runtime.roles.delivery import Chunk
from mcore_rl.runtime.roles.engine import Report
from mcore_rl.runtime.roles.engine_pool import EnginePool, PooledEngine
from mcore_rl.types import RolloutResult, RolloutScalars, RolloutTask, SamplingOptions, Total

SAMPLES = 2


class Process:
    """An engine's process: runs are noted, and end when the test's Watch says so."""

    def __init__(self, name: str) -> None:
        self.name, self.runs, self.forgotten = name, 0, []
        self.given: list[RolloutTask] = []
        self.left: list[tuple[int, int]] = []
        """Number and key of tasks that have not ended."""

    @property
    def run(self) -> Process:
        return self

    def remote(self, tasks: list[tuple[int, RolloutTask]], more: bool, forget: list[int]) -> tuple[int, int]:
        for number, task in tasks:
            self.left.append((number, len(self.given)))
            self.given.append(task)
        self.forgotten += forget
        self.runs += 1
        return id(self), self.runs


@dataclass
class Start:
    name: str
    processes: list[Process] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.again()

    @property
    def handles(self) -> list[Any]:
        return [self.processes[-1]]

    @property
    def journal(self) -> str:
        return f"{self.name}.{len(self.processes)}"

    def again(self) -> str:
        self.processes.append(Process(self.name))
        return f"{self.name} starts"


class Watch:
    """Ends the oldest call at each wait, with the oldest of its engine's tasks done, or all if there are no more to be
    had; `dying[n]` are the processes that die at wait n, with their calls."""

    def __init__(self, dying: dict[int, list[str]]) -> None:
        self.dying, self.waits, self.dead = dying, 0, {}
        self.starts: list[Start] = []

    def wait(self, calls: Sequence[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        self.waits += 1
        for name in self.dying.pop(self.waits, []):
            process = next(start for start in self.starts if start.name == name).processes[-1]
            self.dead[id(process)] = f"{name} died: killed"
        return list(calls[:num_returns]), list(calls[num_returns:])

    def value(self, call: tuple[int, int]) -> Report:
        process_id, number = call
        if process_id in self.dead:
            raise WorkerDiedError("a process died")
        process = next(p for start in self.starts for p in start.processes if id(p) == process_id)
        ended, process.left = process.left[:1], process.left[1:]
        report = [(task, key, scalars_of(process.given[key])) for task, key in ended]
        return Report(report, SAMPLES * len(process.left), float(number))

    def lost(self, process: Process) -> str | None:
        return self.dead.get(id(process))

    @property
    def any_lost(self) -> bool:
        return bool(self.dead)

    def blame_the_dead(self) -> None: ...

    def get_started(self, starts: Mapping[Any, Sequence[Any]]) -> None: ...


def scalars_of(task: RolloutTask) -> RolloutScalars:
    ids = np.repeat(task.group_ids, SAMPLES)
    ints, numbers = np.full(len(ids), 7, np.int32), np.zeros(len(ids), np.float32)
    return RolloutScalars(
        ids, np.repeat(task.prompt_rows, SAMPLES), ints, ints, ints, numbers, numbers,
        np.zeros(len(ids), np.uint8), np.zeros((len(ids), 2), np.int32),
    )  # fmt: skip


def tasks_of(count: int) -> list[RolloutTask]:
    return [
        RolloutTask("train", np.array([i]), np.array([i]), SAMPLES, SamplingOptions(8), 1, f"part {i}")
        for i in range(count)
    ]


def pool_of(num_engines: int, dying: dict[int, list[str]] | None = None, **options: Any) -> tuple[EnginePool, Watch]:
    watch = Watch(dying or {})
    watch.starts = [Start(f"engine {number}") for number in range(num_engines)]
    engines = [PooledEngine(start) for start in watch.starts]
    options = {"max_restarts": 3, "note": lambda line: None} | options
    pool = EnginePool(engines, cast(Any, watch), room=4, **options)
    pool.supply = lambda: pool.settle() and pool.supplied()  # type: ignore[func-returns-value]
    return pool, watch


def groups(results: Sequence[RolloutResult]) -> list[list[int]]:
    return [scalars.group_ids.tolist() for _, scalars in results]


ALL = [[i] * SAMPLES for i in range(12)]


@pytest.mark.parametrize("dying", [{}, {1: ["engine 1"]}, {4: ["engine 0"]}, {2: ["engine 0"], 6: ["engine 2"]}])
def test_every_result_comes_in_the_order_of_the_tasks_whoever_dies(dying: dict[int, list[str]]) -> None:
    losses = sum(map(len, dying.values()))
    pool, _ = pool_of(3, dict(dying))
    results = pool.run(tasks_of(12))
    assert groups(results) == ALL
    living = {engine.maker for engine in pool.engines}
    assert {cast(Chunk, chunk).place.maker for chunk, _ in results} <= living
    restarts = pool.take_figures()["engine/restarts"]
    assert restarts == Total(losses)
    assert pool.num_without_weights == losses


def test_the_last_engine_is_waited_for_and_gets_weights_before_it_goes_on() -> None:
    pool, watch = pool_of(1, {3: ["engine 0"], 9: ["engine 0"]})
    assert groups(pool.run(tasks_of(12))) == ALL
    assert [len(start.processes) for start in watch.starts] == [3]
    assert pool.num_without_weights == 0


def test_one_loss_too_many_ends_the_run_with_the_reason_and_the_key() -> None:
    said: list[str] = []
    pool, _ = pool_of(2, {1: ["engine 0"], 2: ["engine 1"]}, max_restarts=1, note=said.append)
    with pytest.raises(WorkerDiedError, match=r"engine 1 died: killed \(rollout\.max_engine_restarts=1\)"):
        pool.run(tasks_of(12))
    assert said == ["warning: engine 0 died: killed; it starts again (1 of 1 times)"]


def test_what_fails_without_a_death_is_no_loss() -> None:
    pool, watch = pool_of(2)

    def value(call: Any) -> Any:
        raise WorkerDiedError("a process failed: Traceback")

    watch.value = value  # type: ignore[method-assign]
    with pytest.raises(WorkerDiedError, match="a process failed"):
        pool.run(tasks_of(2))
    assert pool.num_restarts == 0


def test_what_only_a_lost_engine_keeps_is_made_again_elsewhere_without_records() -> None:
    pool, watch = pool_of(2)
    results = pool.run(tasks_of(4))
    chunks = [cast(Chunk, chunk) for chunk, _ in results]
    before = [chunk.place for chunk in chunks]
    assert not pool.renew(chunks)
    watch.dead[id(watch.starts[0].processes[-1])] = "engine 0 died: killed"
    assert pool.renew(chunks)
    for chunk, place in zip(chunks, before, strict=True):
        assert chunk.place.maker == "engine 1"
        assert (chunk.place is place) == (place.maker == "engine 1")
    again = watch.starts[1].processes[0].given[-2:]
    assert [task.records for task in again] == [None, None]
    assert [task.journals for task in again] == [("engine 0.1",)] * 2
    assert all(chunk.task.journals == () for chunk in chunks)


def test_what_a_lost_engine_was_given_goes_on_from_its_journal_and_that_of_who_was_lost_after_it() -> None:
    pool, watch = pool_of(2, {2: ["engine 0"], 4: ["engine 1"]})
    assert groups(pool.run(tasks_of(12))) == ALL
    given = [task for start in watch.starts for process in start.processes for task in process.given]
    assert {task.journals for task in given} >= {(), ("engine 0.1",), ("engine 0.1", "engine 1.1")}


def test_an_engine_that_started_again_is_not_told_to_forget_what_its_predecessor_kept() -> None:
    pool, watch = pool_of(1, {1: ["engine 0"]})
    results = pool.run(tasks_of(2))
    first = [cast(Chunk, chunk).place.key for chunk, _ in results]
    del results
    gc.collect()
    pool.run(tasks_of(1))
    before, after = watch.starts[0].processes
    assert (before.forgotten, sorted(after.forgotten)) == ([], sorted(first))
