"""Streaming scheduler: every task returns once, also if engines die."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from mcore_rl.errors import WorkerDiedError
from mcore_rl.runtime.delivery import Chunk
from mcore_rl.runtime.engines.scheduler import Scheduler
from mcore_rl.types import RolloutScalars, RolloutTask
from tests.unit.runtime.engines import Begin, Process, groups, scalars_of
from tests.unit.runtime.streams import (
    Once,
    StreamWatch,
    begin,
    finish_all,
    producers,
    stream_of,
    supply,
    task_of,
    tickets,
)


def test_begin_after_a_noticed_death_avoids_the_dead_engine() -> None:
    stream, watch = stream_of(2)
    begin(stream, [2, 5], {})
    watch.kill("engine 0")
    stream.ended([watch.waiting_call(watch.present("engine 0"))])
    begin(stream, [1], {})
    assert tickets(watch) == [[0], [1, 2]]


@pytest.mark.parametrize("brings", [False, True])
def test_failure_without_a_death_is_raised(brings: bool) -> None:
    """The failing call is `run` or `begin`."""
    stream, watch = stream_of(2)
    begin(stream, [1] * 3, {})
    process = watch.present("engine 1" if brings else "engine 0")
    [call] = [call for call in stream.calls() if call.process_id == id(process) and isinstance(call, Begin) == brings]

    def value(call: object) -> None:
        raise WorkerDiedError("a process failed: Traceback")

    watch.value = value  # type: ignore[method-assign]
    with pytest.raises(WorkerDiedError, match="a process failed"):
        stream.ended([call])
    assert stream.fleet.num_restarts == 0


@pytest.mark.parametrize("supplied", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_tasks_of_an_engine_restarted_by_a_publish_go_to_others(supplied: bool, late: bool) -> None:
    """The publish restarts an engine. A late report of its previous process does not count."""
    stream, watch = stream_of(2, seed=0)
    results = Once()
    tasks = begin(stream, [1, 1, 1, 1], results)
    call, old = watch.finish("engine 0", 0), watch.present("engine 0")
    watch.killed[id(old)] = "hung"
    stream.fleet.lose(stream.fleet.engines[0], "it holds other weights")
    if supplied:
        supply(stream)
        tasks |= begin(stream, [1, 1], results)
    if late:
        stream.ended([call])
    assert not results
    while stream.running_requests:
        stream.wait()
        assert all(call.process_id != id(old) for call in stream.calls())
    assert sorted(results) == list(range(len(tasks)))
    living = {"engine 1", "engine 0 (started 2 times)"} if supplied else {"engine 1"}
    assert set(producers(results).values()) == living
    again = [task for engine in watch.engines for process in engine.all for task in process.given if task.journals]
    assert sorted(int(task.group_ids[0]) for task in again) == [0, 2]


def test_wait_without_engines_supplies_weights_and_begins_lost_tasks_first() -> None:
    stream, watch = stream_of(2)
    supplies = []

    def publish() -> None:
        supplies.append(len(stream.calls()))
        supply(stream)

    stream.supply = publish
    results = Once()
    begin(stream, [1] * 4, results)
    watch.kill("engine 0")
    watch.kill("engine 1")
    watch.wait([], 0)  # a wait of another component
    begin(stream, [1], results)
    assert supplies == []
    stream.wait()
    assert supplies == [0]
    assert tickets(watch) == [[0, 2, 4], [1, 3]]
    finish_all(stream, watch)
    assert sorted(results) == list(range(5))


@dataclass
class Drive:
    """Random run: tasks begin, other calls are awaited, weights are published, engines die."""

    seed: int
    deaths: int
    results: Once = field(default_factory=Once)
    tasks: dict[int, RolloutTask] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.stream, self.watch = stream_of(3, seed=self.seed, max_restarts=100)
        self.stream.supply = self.publish

    def begin(self) -> None:
        task = task_of(len(self.tasks), self.chance.randint(1, 4))
        self.tasks[self.stream.begin(task, self.results)] = task

    def elsewhere(self) -> None:
        """Wait for something else, such as the trainer."""
        self.watch.wait([], 0)

    def look(self) -> None:
        self.stream.fleet.reap_failed()

    def publish(self) -> None:
        """Publish weights; some engines may not be up yet."""
        self.elsewhere()
        self.watch.slow = {engine.name for engine in self.watch.engines if self.chance.random() < 0.3}
        up = self.stream.fleet.up()
        self.elsewhere()
        self.stream.fleet.mark_supplied(up)

    def validate(self) -> None:
        asked = [task_of(1000 + number, 2, "validation") for number in range(3)]
        assert groups(self.stream.run(asked)) == [[1000 + number] * 2 for number in range(3)]

    def die(self) -> None:
        if self.deaths:
            self.deaths -= 1
            names = [engine.name for engine in self.watch.engines]
            dying = names if self.chance.random() < 0.2 else [self.chance.choice(names)]
            for name in dying:
                self.watch.kill(name, noticed=self.chance.random() < 0.5)

    def step(self) -> None:
        begin = self.begin if len(self.tasks) < 30 else self.stream.wait
        actions = [begin, self.stream.wait, self.elsewhere, self.die, self.look, self.publish, self.validate]
        self.chance.choices(actions, [8, 6, 3, 2, 1, 1, 1])[0]()
        waiting = [call.process_id for call in self.stream.calls() if not isinstance(call, Begin)]
        assert len(waiting) == len(set(waiting))
        under_way = [task.num_responses for ticket, task in self.tasks.items() if ticket not in self.results]
        assert self.stream.running_requests == sum(under_way)


@pytest.mark.parametrize("seed", range(100))
def test_every_task_returns_once_with_the_journals_of_lost_engines(seed: int) -> None:
    drive = Drive(seed, deaths=seed % 6)
    stream, watch = drive.stream, drive.watch
    while len(drive.results) < 30:
        drive.step()
    processes = [process for engine in watch.engines for process in engine.all]
    journals = {
        id(process): f"{engine.name}.{number}"
        for engine in watch.engines
        for number, process in enumerate(engine.all, 1)
    }
    for ticket, task in drive.tasks.items():
        chunk, scalars = drive.results[ticket]
        assert scalars.group_ids.tolist() == [int(task.group_ids[0])] * task.num_responses
        had = [(given, p) for p in processes for given in p.given if given.group_ids[0] == task.group_ids[0]]
        had.sort(key=lambda pair: len(pair[0].journals))
        names = [journals[id(process)] for _, process in had]
        assert [given.journals for given, _ in had] == [tuple(names[:count]) for count in range(len(names))]
        assert {(given.span, given.records) for given, _ in had} == {(task.span, task.records)}
        [part] = cast(Chunk, chunk).parts
        assert part.place.process is had[-1][1]
        assert part.place.process.given[part.place.key] is had[-1][0]
        assert cast(Chunk, chunk).task.journals == ()
    assert_level(stream, watch)


def assert_level(stream: Scheduler, watch: StreamWatch) -> None:
    """Assert that no request runs and that all living engines count as idle."""
    assert stream.running_requests == 0
    watch.blame_the_dead()
    stream.fleet.reap_failed()
    watch.slow = set()
    supply(stream)
    stream.wait()
    begin(stream, [1] * 6, {})
    assert [len(of_engine) for of_engine in tickets(watch)] == [2, 2, 2]


def test_renew_while_streaming_generates_lost_trajectories_again() -> None:
    """No weights arrive during the call, so regenerated responses must not wait for any."""
    stream, watch = stream_of(2, seed=0)
    results, others = Once(), Once()
    limited = [replace(task_of(number, 2), tokens_per_version=3, version=5) for number in range(4)]
    tasks = {stream.begin(task, results): task for task in limited}
    finish_all(stream, watch)
    stream.fleet.version = 6
    under_way = begin(stream, [1] * 4, others)
    chunks = [cast(Chunk, results[ticket][0]) for ticket in tasks]
    before = [chunk.parts[0].place for chunk in chunks]
    assert not stream.renew(chunks)
    watch.kill("engine 0")
    assert stream.renew(chunks)
    for chunk, place in zip(chunks, before, strict=True):
        [part] = chunk.parts
        assert part.place.producer == "engine 1"
        assert (part.place is place) == (place.producer == "engine 1")
        assert (part.first, part.last) == part.responses == (0, 2)
    again = [task for task in watch.present("engine 1").given if task.records is None]
    assert [(task.group_ids[0], task.journals) for task in again] == [(0, ("engine 0.1",)), (2, ("engine 0.1",))]
    assert [task.tokens_per_version for task in again] == [None, None]
    assert [task.version for task in again] == [5, 5], "weights that it began with, not those of now"
    assert all(chunk.task.journals == () for chunk in chunks)
    while len(others) < len(under_way):
        stream.wait()
    assert stream.running_requests == 0


def test_renew_with_a_different_result_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, watch = stream_of(2, seed=0)
    results = Once()
    answers = iter(range(100))

    def answer(task: RolloutTask) -> RolloutScalars:
        return replace(scalars_of(task), digests=np.full(task.num_responses, next(answers), np.uint32))

    monkeypatch.setattr(watch, "scalars_of", answer)
    begin(stream, [1] * 2, results)
    finish_all(stream, watch)
    watch.kill("engine 0")
    with pytest.raises(WorkerDiedError, match=r"engine 0 was lost .* regenerated ones differ"):
        stream.renew([cast(Chunk, chunk) for chunk, _ in results.values()])


def test_restore_on_a_lost_engine_is_repeated_on_another(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, watch = stream_of(2)
    task = task_of(0, 2)
    takers: list[Process] = []

    def restore_tasks(process: Process, path: str, request_ids: list[list[str]]) -> Process:
        takers.append(process)
        return process

    def get(calls: list[Process]) -> list[list[int]]:
        if id(calls[0]) in watch.killed:
            raise WorkerDiedError("a process died")
        return [[7]]

    monkeypatch.setattr(Process, "restore_tasks", restore_tasks, raising=False)
    monkeypatch.setattr(watch, "get", get, raising=False)
    watch.kill("engine 0")
    (chunk,) = stream.restore(Path("file"), [(task, scalars_of(task))])
    [part] = cast(Chunk, chunk).parts
    assert (part.place.producer, part.place.process, part.place.key) == ("engine 1", takers[-1], 7)
    assert [process.name for process in takers] == ["engine 0", "engine 1"]
