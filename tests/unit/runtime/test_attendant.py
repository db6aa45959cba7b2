"""Waits of a Watch with an attendant, which receives its ended calls in every wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from mcore_rl.errors import WorkerDiedError
from mcore_rl.rollout.tasks import Until
from mcore_rl.runtime import health
from mcore_rl.runtime.engines.fleet import Fleet, FleetEngine
from mcore_rl.runtime.engines.process import EngineReport
from mcore_rl.runtime.engines.scheduler import Scheduler
from mcore_rl.runtime.health import PART_OF_CALLS, SECONDS_BETWEEN_LOOKS, SECONDS_TO_GATHER, Watch
from mcore_rl.runtime.roles import places
from mcore_rl.types import RolloutResult, RolloutScalars, RolloutTask
from tests.unit.runtime.engines import scalars_of, tasks_of
from tests.unit.runtime.fake_ray import Call, Process, Ray


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    fake = Ray()
    for module in (health, places):
        monkeypatch.setattr(module, "ray", fake)
    monkeypatch.setattr(health, "time", SimpleNamespace(monotonic=lambda: fake.now))
    return fake


@dataclass
class Clerk:
    """Attendant that records the calls that it receives, and the times."""

    ray: Ray
    own: list[Call]
    taken: list[Call] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    then: Callable[[], None] = lambda: None

    def calls(self) -> list[Any]:
        return list(self.own)

    def ended(self, calls: Sequence[Any]) -> None:
        assert calls
        self.at.append(round(self.ray.seconds, 3))
        for call in calls:
            assert call.ended
            self.own.remove(call)
            self.taken.append(call)
        self.then()


def watch_of(ray: Ray, names: Sequence[str] = (), **options: Any) -> tuple[Watch, dict[str, Process]]:
    watch, processes = Watch(**options), {name: Process(ray, name) for name in names}
    for process in processes.values():
        watch.add(process)
    return watch, processes


@pytest.mark.parametrize("count", [1, 5, 15, 16, 17, 31, 32, 60, 200])
def test_attendant_receives_each_ended_call_once(ray: Ray, count: int) -> None:
    watch, _ = watch_of(ray, ["rank 0"])
    own = [ray.call(0.03 * number, "own") for number in range(count)]
    clerk = watch.attendant = Clerk(ray, list(own))
    calls = [ray.call(seconds, seconds) for seconds in (7.0, 0.2, 1.5, 9.0)]
    assert watch.get([calls[0], calls[1], calls[0], calls[2], calls[3]]) == [7.0, 0.2, 7.0, 1.5, 9.0]
    assert clerk.taken == own
    assert clerk.own == []
    assert ray.seconds == pytest.approx(9.0)


def test_calls_begun_in_a_wait_are_awaited_in_it(ray: Ray) -> None:
    watch, _ = watch_of(ray)
    clerk = watch.attendant = Clerk(ray, [ray.call(0.1)])
    clerk.then = lambda: clerk.own.append(ray.call(0.1))
    assert watch.get([ray.call(1.05, "done")]) == ["done"]
    assert clerk.at == [round(0.1 * number, 3) for number in range(1, 11)]


def test_wait_without_refs_serves_the_attendant(ray: Ray) -> None:
    watch, _ = watch_of(ray)
    clerk = watch.attendant = Clerk(ray, [ray.call(0.2), ray.call(3.0)])
    assert watch.wait([], 0) == ([], [])
    assert clerk.at == [0.2]
    assert watch.wait([], 0) == ([], [])  # no call ends, so it takes the whole interval
    assert ray.seconds == pytest.approx(0.2 + SECONDS_BETWEEN_LOOKS)
    while clerk.own:
        assert watch.wait([], 0) == ([], [])
    assert clerk.at == [0.2, 3.0]


def test_get_returns_at_once_with_few_attendant_calls(ray: Ray) -> None:
    watch, _ = watch_of(ray)
    watch.attendant = Clerk(ray, [ray.call(60.0) for _ in range(2 * PART_OF_CALLS - 1)])
    assert watch.get([ray.call(0.3, "done")]) == ["done"]
    assert ray.seconds == pytest.approx(0.3)


def test_many_attendant_calls_are_gathered(ray: Ray) -> None:
    watch, _ = watch_of(ray)
    soon = [ray.call(0.001 * number) for number in range(1, 5)]
    others = [ray.call(0.21), ray.call(0.22)]  # within one interval of gathering
    late = [ray.call(60.0) for _ in range(4 * PART_OF_CALLS - 6)]
    clerk = watch.attendant = Clerk(ray, [*soon, *others, *late])
    watch.wait([], 0)
    assert (clerk.taken, clerk.at) == (soon, [0.004])  # 1 / PART_OF_CALLS of the calls
    while len(clerk.taken) < 6:
        watch.wait([], 0)
    assert clerk.taken == [*soon, *others]
    assert len(clerk.at) == 2  # delivered together after the interval, although they are fewer
    assert clerk.at[-1] <= 0.21 + SECONDS_TO_GATHER


def test_calls_that_ended_meanwhile_are_handed_over_together(ray: Ray) -> None:
    """A look at all calls takes time in proportion to their number."""
    watch, _ = watch_of(ray)
    clerk = watch.attendant = Clerk(ray, [ray.call(0.1) for _ in range(10)])
    watch.wait([], 0)
    assert (len(clerk.taken), clerk.at) == (10, [0.1])


def wait_long(ray: Ray, watch: Watch, waiting: bool) -> None:
    """Wait for a call, or only for the attendant's calls."""
    if waiting:
        watch.get([ray.call(1000.0)])
    while not waiting and ray.seconds < 1000:
        watch.wait([], 0)


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("waiting", [False, True])
def test_death_is_noticed_despite_attendant_calls(ray: Ray, busy: bool, waiting: bool) -> None:
    """Also if the attendant's calls end so often that every wait is short."""
    watch, processes = watch_of(ray, ["rank 0", "rank 1"])
    clerk = watch.attendant = Clerk(ray, [ray.call(0.1 if busy else 1000.0)])
    if busy:
        clerk.then = lambda: clerk.own.append(ray.call(0.1))
    ray.after(2.0, processes["rank 1"].die)
    with pytest.raises(WorkerDiedError, match="rank 1 died"):
        wait_long(ray, watch, waiting)
    assert 2.0 <= ray.seconds < 4.0


@pytest.mark.parametrize("waiting", [False, True])
def test_silent_process_is_noticed_despite_attendant_calls(ray: Ray, waiting: bool) -> None:
    watch, processes = watch_of(ray, ["rank 0", "rank 1"], timeout_seconds=20.0)
    watch.attendant = Clerk(ray, [ray.call(1000.0)])
    silent = processes["rank 0"]
    ray.after(10.0, lambda: stop(silent))
    with pytest.raises(WorkerDiedError, match="rank 0 did not answer for 20 s"):
        wait_long(ray, watch, waiting)


def test_error_of_the_attendant_ends_the_wait(ray: Ray) -> None:
    watch, _ = watch_of(ray)

    def fail() -> None:
        raise WorkerDiedError("a process failed")

    watch.attendant = Clerk(ray, [ray.call(0.5)], then=fail)
    with pytest.raises(WorkerDiedError, match="a process failed"):
        watch.get([ray.call(9.0)])


def test_wait_without_attendant_calls_returns_num_returns(ray: Ray) -> None:
    watch, _ = watch_of(ray)
    watch.attendant = Clerk(ray, [])
    calls = [ray.call(0.1 * number) for number in range(4)]
    assert watch.wait(calls, 2) == (calls[:2], calls[2:])


class EngineHandle(Process):
    """Process of an engine whose tasks take a second each and run concurrently."""

    def __init__(self, ray: Ray, name: str) -> None:
        super().__init__(ray, name)
        self.runs, self._done, self._waiting = 0, [], None
        self._requests_received = self._requests_ended = 0

    def begin(self, tasks: Sequence[tuple[int, RolloutTask]]) -> object:
        self._requests_received += sum(task.num_responses for _, task in tasks)
        for number, task in tasks:
            self.ray.after(1.0, partial(self._end, number, scalars_of(task)))
        return self.ended(None)

    def run(self, tasks: Sequence[tuple[int, RolloutTask]], until: Until, released: Sequence[int]) -> object:
        assert until is Until.ANY
        self.runs += 1
        self.begin(tasks)
        self._waiting = self.open_call()
        self._tell()
        return self._waiting

    def _end(self, number: int, scalars: RolloutScalars) -> None:
        self._done.append((number, number, scalars))
        self._tell()

    def _tell(self) -> None:
        """End the call of `run` if it waits and tasks have ended."""
        if self._waiting is not None and not self._waiting.ended and self._done:
            self._requests_ended += sum(len(scalars.group_ids) for _, _, scalars in self._done)
            left = self._requests_received - self._requests_ended
            self.ray.end(self._waiting, EngineReport(self._done, self._requests_received, left, 0.0, 0))
            self._done = []


class Engine(FleetEngine):
    """Engine with a fake process; its start takes 3 seconds."""

    process: EngineHandle

    def __init__(self, number: int, watch: Watch, ray: Ray) -> None:
        self.ray, self.lost = ray, list[EngineHandle]()
        super().__init__(number, f"engine {number}", [], [], watch, "", None)

    def _create(self) -> list[Any]:
        self.process = EngineHandle(self.ray, self.name)
        return [self.process]

    def kill(self) -> None:
        self.process.die()
        self.lost.append(self.process)

    def _set_up(self) -> Any:
        return self.ray.call(3.0)


def stream_of(ray: Ray, num_engines: int) -> tuple[Scheduler, list[Engine], Watch]:
    watch = Watch()
    engines = [Engine(number, watch, ray) for number in range(num_engines)]
    watch.allow_failure([engine.process for engine in engines])
    fleet = Fleet([*engines], watch, num_engines, note=lambda line: None)
    scheduler = Scheduler(fleet, 8, streaming=True, supply=lambda: fleet.mark_supplied(fleet.up()))
    return scheduler, engines, watch


@pytest.mark.parametrize("dying", [(0,), (2,), (0, 1), (1, 0), (0, 2), (2, 0), (2, 1), (0, 1, 2)])
def test_engines_that_die_together_are_all_replaced(ray: Ray, dying: tuple[int, ...]) -> None:
    """Example: a host with several engines dies."""
    stream, engines, _ = stream_of(ray, 3)
    ray.after(0.5, lambda: [engines[number].process.die() for number in dying] and None)
    assert [scalars.group_ids[0] for _, scalars in stream.run(tasks_of(9))] == list(range(9))
    assert [len(engine.lost) for engine in engines] == [int(number in dying) for number in range(3)]


def test_engine_that_misses_its_start_deadline_starts_again(ray: Ray) -> None:
    """The start takes 3 seconds, the deadline is 2 seconds."""
    stream, engines, watch = stream_of(ray, 2)
    pool, watch.start_seconds = stream.fleet, 2.0
    pool.lose(pool.engines[0], "engine 0 died")
    assert pool.up() == engines[1:]
    ray.wait([Call()], timeout=2.5)
    assert pool.up() == engines[1:]
    assert len(engines[0].lost) == 2
    ray.wait([Call()], timeout=3.5)
    assert pool.up() == engines
    assert len(engines[0].lost) == 2


def test_is_lost_is_true_for_every_dead_engine(ray: Ray) -> None:
    """The death of one engine does not explain the failure of another."""
    stream, engines, _ = stream_of(ray, 3)
    engines[0].process.die()
    engines[2].process.die()
    assert [stream.fleet.is_lost(stream.fleet.engines[number]) for number in (2, 0, 1)] == [True, True, False]


def test_engines_that_die_during_another_wait_are_replaced_later(ray: Ray) -> None:
    stream, engines, watch = stream_of(ray, 3)
    results: dict[int, RolloutResult] = {}
    for task in tasks_of(9):
        stream.begin(task, results)
    ray.after(0.5, engines[2].process.die)
    ray.after(0.7, engines[0].process.die)
    assert watch.get([ray.call(100.0, "trained")]) == ["trained"]
    assert len(results) == 3
    assert [len(engine.lost) for engine in engines] == [0, 0, 0]
    assert (engines[0].process.runs, engines[2].process.runs) == (1, 1)  # dead engines get no further calls
    assert ray.waits < 600
    while len(results) < 9:
        stream.wait()
    assert [len(engine.lost) for engine in engines] == [1, 0, 1]


def test_failed_call_of_a_replaced_process_waits_for_no_death(ray: Ray) -> None:
    """The engine was replaced without a death that could explain the failure of its calls."""
    stream, engines, watch = stream_of(ray, 2)
    results: dict[int, RolloutResult] = {}
    for task in tasks_of(4):
        stream.begin(task, results)
    ray.after(0.2, lambda: stream.fleet.lose(stream.fleet.engines[0], "engine 0 holds other weights"))
    assert watch.get([ray.call(0.5, "compared")]) == ["compared"]
    assert ray.seconds == pytest.approx(0.5)
    while len(results) < 4:
        stream.wait()
    assert [len(engine.lost) for engine in engines] == [1, 0]


def stop(process: Process) -> None:
    """Let a process answer no more, as after SIGSTOP."""
    process.is_stopped = True


@pytest.mark.parametrize("role", ["owes the result", "is needed by another process"])
def test_get_of_a_stopped_replaceable_process_raises_in_time(ray: Ray, role: str) -> None:
    watch, processes = watch_of(ray, ["rank 0", "engine 0", "engine 1"], timeout_seconds=20.0)
    rank, engine = processes["rank 0"], processes["engine 0"]
    watch.allow_failure([engine, processes["engine 1"]])
    ray.after(15.0, lambda: stop(engine))
    call, needs = (engine.open_call(), []) if role == "owes the result" else (rank.open_call(), [engine])
    with pytest.raises(WorkerDiedError, match="engine 0 did not answer for 20 s"):
        watch.get([call], needs)
    assert ray.seconds - 15.0 < watch.dependent_seconds
    assert engine in watch.lost
    assert processes["engine 1"] not in watch.lost


def test_get_ignores_a_lost_process_that_owes_nothing(ray: Ray) -> None:
    watch, processes = watch_of(ray, ["rank 0", "engine 0"], timeout_seconds=20.0)
    watch.allow_failure([processes["engine 0"]])
    ray.after(15.0, lambda: stop(processes["engine 0"]))
    assert watch.get([ray.call(90.0, "trained")]) == ["trained"]
    assert watch.lost


def test_get_with_a_replaced_process_in_needs_raises_at_once(ray: Ray) -> None:
    watch, processes = watch_of(ray, ["rank 0", "engine 0"])
    watch.allow_failure([processes["engine 0"]])
    watch.replace(processes["engine 0"], Process(ray))
    with pytest.raises(WorkerDiedError, match="replaced"):
        watch.get([processes["rank 0"].open_call()], [processes["engine 0"]])
    assert ray.seconds < 4.0


@pytest.mark.parametrize("seconds", [5, 60, 600])
def test_dependents_wait_longer_than_silence_is_detected(ray: Ray, seconds: int) -> None:
    """The process may stop at any time between two probes."""
    for moment in range(seconds, 3 * seconds, max(1, seconds // 7)):
        watch, processes = watch_of(ray, ["engine 0"], timeout_seconds=float(seconds))
        began = ray.seconds
        ray.after(moment, partial(stop, processes["engine 0"]))
        with pytest.raises(WorkerDiedError, match="did not answer"):
            watch.get([ray.call(40.0 * seconds)])
        assert ray.seconds - began - moment < watch.dependent_seconds - 2 * SECONDS_BETWEEN_LOOKS
