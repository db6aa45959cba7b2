"""Tasks of a pool whose engines die: every result comes, once, in the order of the tasks."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from mcore_rl.errors import WorkerDiedError
from mcore_rl.rollout.stealing import Tail, share
from mcore_rl.rollout.tasks import GivenUp
from mcore_rl.runtime.roles.delivery import Chunk
from mcore_rl.runtime.roles.engine import Report
from mcore_rl.runtime.roles.engine_pool import EnginePool, PooledEngine
from mcore_rl.types import RolloutResult, RolloutScalars, RolloutTask, SamplingOptions, Total

SAMPLES = 2


class GiveUp:
    """What a process is asked for; it answers when the test's Watch says so."""

    def __init__(self, process: Process) -> None:
        self.process = process

    def remote(self, free: int) -> tuple[int, GiveUp, int]:
        self.process.asked += 1
        return id(self.process), self, free


class Process:
    """An engine's process: runs are noted, and end when the test's Watch says so. Of its tasks the oldest has begun,
    and those that it had at its last report."""

    def __init__(self, name: str) -> None:
        self.name, self.runs, self.forgotten = name, 0, []
        self.begun = self.asked = self.answers = 0
        self.given: list[RolloutTask] = []
        self.left: list[tuple[int, int]] = []
        """Number and key of tasks that have not ended."""

    @property
    def run(self) -> Process:
        return self

    @property
    def give_up(self) -> GiveUp:
        return GiveUp(self)

    def answer(self, free: int) -> GivenUp:
        self.answers += 1
        tails = [
            Tail(number, *self.given[key].span, self.given[key].samples_per_prompt)
            for number, key in self.left[1:]
            if key >= self.begun
        ]
        chosen = share(tails, free)
        keys = dict(self.left)
        for tail in chosen:
            task = self.given[keys[tail.task]]
            self.given[keys[tail.task]] = replace(task, responses=(task.span[0], tail.first))
        self.left = [(number, key) for number, key in self.left if self.given[key].num_responses]
        unbegun = sum(tail.last - tail.first for tail in tails) - sum(tail.last - tail.first for tail in chosen)
        return GivenUp([(tail.task, tail.first) for tail in chosen], unbegun)

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
    """Ends the oldest call at each wait, with the oldest of its engine's tasks done and the others begun; `dying[n]`
    are the processes that die at wait n, with their calls. With a seed, some calls end, in some order."""

    def __init__(self, dying: dict[int, list[str]], seed: int | None = None) -> None:
        self.dying, self.waits, self.dead = dying, 0, {}
        self.random = None if seed is None else random.Random(seed)
        self.starts: list[Start] = []

    def wait(self, calls: Sequence[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        self.waits += 1
        for name in self.dying.pop(self.waits, []):
            process = next(start for start in self.starts if start.name == name).processes[-1]
            self.dead[id(process)] = f"{name} died: killed"
        ended = list(calls[:num_returns])
        if self.random is not None:
            ended = self.random.sample(list(calls), self.random.randint(num_returns, len(calls)))
        return ended, [call for call in calls if call not in ended]

    def value(self, call: Any) -> Report | GivenUp:
        process_id, number = call[:2]
        if process_id in self.dead:
            raise WorkerDiedError("a process died")
        process = next(p for start in self.starts for p in start.processes if id(p) == process_id)
        if isinstance(number, GiveUp):
            return process.answer(call[2])
        ended, process.left = process.left[:1], process.left[1:]
        process.begun = len(process.given)
        report = [(task, key, scalars_of(process.given[key])) for task, key in ended]
        for _, key in ended:
            record(process.given[key])
        requests = sum(process.given[key].num_responses for _, key in process.left)
        return Report(report, requests, float(number))

    def lost(self, process: Process) -> str | None:
        return self.dead.get(id(process))

    @property
    def any_lost(self) -> bool:
        return bool(self.dead)

    def blame_the_dead(self) -> None: ...

    def get_started(self, starts: Mapping[Any, Sequence[Any]]) -> None: ...


def scalars_of(task: RolloutTask) -> RolloutScalars:
    rows = slice(*task.span)
    ids = np.repeat(task.group_ids, task.samples_per_prompt)[rows]
    ints, numbers = np.full(len(ids), 7, np.int32), np.zeros(len(ids), np.float32)
    return RolloutScalars(
        ids, np.repeat(task.prompt_rows, task.samples_per_prompt)[rows], ints, ints, ints, numbers, numbers,
        np.zeros(len(ids), np.uint8), np.zeros((len(ids), 2), np.int32),
    )  # fmt: skip


def record(task: RolloutTask) -> None:
    """Where the test has a directory for it."""
    if task.records is not None and os.path.isabs(task.records):
        lines = [task.request_id(response) + "\n" for response in range(*task.span)]
        Path(task.records).write_text("".join(lines))


def tasks_of(count: int) -> list[RolloutTask]:
    return [
        RolloutTask("train", np.array([i]), np.array([i]), SAMPLES, SamplingOptions(8), 1, f"part {i}")
        for i in range(count)
    ]


def pool_of(
    num_engines: int,
    dying: dict[int, list[str]] | None = None,
    *,
    room: int = 4,
    seed: int | None = None,
    **options: Any,
) -> tuple[EnginePool, Watch]:
    watch = Watch(dying or {}, seed)
    watch.starts = [Start(f"engine {number}") for number in range(num_engines)]
    engines = [PooledEngine(start) for start in watch.starts]
    options = {"max_restarts": 3, "note": lambda line: None} | options
    pool = EnginePool(engines, cast(Any, watch), room=room, **options)
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
    assert {cast(Chunk, chunk).parts[0].place.maker for chunk, _ in results} <= living
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
    pool.version = 5
    results = pool.run(tasks_of(4))
    pool.version = 6
    chunks = [cast(Chunk, chunk) for chunk, _ in results]
    before = [chunk.parts[0].place for chunk in chunks]
    assert not pool.renew(chunks)
    watch.dead[id(watch.starts[0].processes[-1])] = "engine 0 died: killed"
    assert pool.renew(chunks)
    for chunk, place in zip(chunks, before, strict=True):
        assert chunk.parts[0].place.maker == "engine 1"
        assert (chunk.parts[0].place is place) == (place.maker == "engine 1")
    again = watch.starts[1].processes[0].given[-2:]
    assert [task.records for task in again] == [None, None]
    assert [task.journals for task in again] == [("engine 0.1",)] * 2
    assert [task.version for task in again] == [5, 5], "weights that it began with, not those of now"
    assert all(chunk.task.journals == () for chunk in chunks)


def test_what_a_lost_engine_was_given_goes_on_from_its_journal_and_that_of_who_was_lost_after_it() -> None:
    pool, watch = pool_of(2, {2: ["engine 0"], 4: ["engine 1"]})
    assert groups(pool.run(tasks_of(12))) == ALL
    given = [task for start in watch.starts for process in start.processes for task in process.given]
    assert {task.journals for task in given} >= {(), ("engine 0.1",), ("engine 0.1", "engine 1.1")}


def test_an_engine_that_started_again_is_not_told_to_forget_what_its_predecessor_kept() -> None:
    pool, watch = pool_of(1, {1: ["engine 0"]})
    results = pool.run(tasks_of(2))
    first = [cast(Chunk, chunk).parts[0].place.key for chunk, _ in results]
    del results
    gc.collect()
    pool.run(tasks_of(1))
    before, after = watch.starts[0].processes
    assert (before.forgotten, sorted(after.forgotten)) == ([], sorted(first))


def task_of(number: int, directory: Path, num_groups: int = 3, samples: int = 4) -> RolloutTask:
    rows = np.arange(num_groups * number, num_groups * (number + 1))
    return RolloutTask("train", rows, rows, samples, SamplingOptions(8), 1, str(directory / f"part_{number}"))


@pytest.mark.parametrize("seed", range(40))
def test_stolen_parts_of_tasks_come_back_in_their_places_whoever_dies_meanwhile(seed: int, tmp_path: Path) -> None:
    """Calls end in any order, answers before or after the reports that follow them; up to three engines die."""
    chance = random.Random(seed)
    dying = {chance.randrange(1, 25): [f"engine {chance.randrange(3)}"] for _ in range(seed % 4)}
    pool, watch = pool_of(3, dying, room=200, seed=seed)
    tasks = [task_of(number, tmp_path) for number in range(14)]
    results = pool.run(tasks)
    assert groups(results) == [np.repeat(task.group_ids, 4).tolist() for task in tasks]
    for task, (chunk, _) in zip(tasks, results, strict=True):
        lines = Path(str(task.records)).read_text().splitlines()
        assert lines == [task.request_id(response) for response in range(12)]
        parts = cast(Chunk, chunk).parts
        assert [0, *(part.last for part in parts)] == [*(part.first for part in parts), 12]
        for part in parts:  # what is kept there are these responses
            process = next(p for start in watch.starts for p in start.processes if p is part.place.handle)
            assert process.given[part.place.key].span == (part.first, part.last)
    living = {engine.maker for engine in pool.engines}
    assert {part.place.maker for chunk, _ in results for part in cast(Chunk, chunk).parts} <= living
    assert len(list(tmp_path.iterdir())) == len(tasks)


def test_nobody_is_left_who_would_give_up_what_the_next_run_brings(tmp_path: Path) -> None:
    """The answer comes after all else: the engine that was asked ends its task before."""
    pool, watch = pool_of(2, room=240)
    pool.run([task_of(number, tmp_path) for number in range(2)])
    processes = [process for start in watch.starts for process in start.processes]
    assert sum(process.asked for process in processes) > 0
    assert all(process.asked == process.answers for process in processes)


def test_what_idle_engines_have_taken_is_counted_and_made_again_part_by_part(tmp_path: Path) -> None:
    """The first engine that ends its first task takes of what the others have not begun."""
    pool, watch = pool_of(3, room=240, seed=1)
    tasks = [task_of(number, tmp_path, num_groups=6) for number in range(10)]
    results = pool.run(tasks)
    assert cast(Total, pool.take_figures()["engine/requests_stolen"]).value > 0
    chunks = [cast(Chunk, chunk) for chunk, _ in results]
    makers = {part.place.maker for chunk in chunks for part in chunk.parts}
    assert len(makers) > 1
    lost = max(makers)
    watch.dead[id(watch.starts[int(lost[-1])].processes[-1])] = f"{lost} died: killed"
    before = [part for chunk in chunks for part in chunk.parts]
    assert pool.renew(chunks)
    for chunk in chunks:
        assert [0, *(part.last for part in chunk.parts)] == [*(part.first for part in chunk.parts), 24]
        assert all(one.last == other.first for one, other in pairwise(chunk.parts))
        for part in chunk.parts:
            assert part.place.maker != lost
            assert part in before or part.place.handle.given[part.place.key].records is None
