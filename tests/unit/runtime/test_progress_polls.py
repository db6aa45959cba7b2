"""Progress of processes on a board: polled in waits, exact, and gone at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from mcore_rl.data.read_progress import Reading
from mcore_rl.errors import WorkerDiedError
from mcore_rl.runtime import health
from mcore_rl.runtime.engines.scheduler import Scheduler
from mcore_rl.runtime.health import Watch
from mcore_rl.runtime.phases import Stages
from mcore_rl.runtime.progress import polls
from mcore_rl.runtime.progress.polls import SET_UP, shown_reads, shown_set_up
from mcore_rl.runtime.roles import places
from tests.unit.runtime import engines
from tests.unit.runtime.engines import SAMPLES, groups, scheduler_over, tasks_of
from tests.unit.runtime.fake_ray import Call, Process, Ray
from tests.unit.runtime.test_scheduler_batches import ALL, DyingWatch


class Recorder:
    """Board that records (work, done, total, unit), and (work,) when it ends."""

    def __init__(self) -> None:
        self.seen: list[tuple[object, ...]] = []

    def update(self, work: str, done: float, total: float, unit: str) -> None:
        if self.seen[-1:] != [(work, done, total, unit)]:
            self.seen.append((work, done, total, unit))

    def end(self, work: str) -> None:
        self.seen.append((work,))


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    fake = Ray()
    for module in (health, places, polls):
        monkeypatch.setattr(module, "ray", fake)
    for module in (health, polls):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: fake.now))
    return fake


class ReadingProcess(Process):
    """Process that answers with `state`."""

    state: Reading | None = None

    def reading(self) -> Call:
        return self.ended(self.state)


def watch_of(ray: Ray, *processes: Process) -> Watch:
    watch = Watch()
    for process in processes:
        watch.add(process)
    return watch


def test_set_up_counts_processes_whose_set_up_has_ended(ray: Ray) -> None:
    processes = [ReadingProcess(ray, f"rank {number}") for number in range(3)]
    watch, board = watch_of(ray, *processes), Recorder()
    starts: dict[Any, list[Process]] = {ray.call(1.2): processes[:2], ray.call(4.2): processes[2:]}
    with shown_set_up(board, watch) as begun:
        begun(starts)  # type: ignore[arg-type]
        watch.get_started(starts)  # type: ignore[arg-type]
    counts = [seen for seen in board.seen if seen[0] == SET_UP]
    assert counts == [(SET_UP, 0, 3, "processes"), (SET_UP, 2, 3, "processes"), (SET_UP,)]


def test_reads_of_processes_are_summed_without_earlier_loads(ray: Ray) -> None:
    first, second = ReadingProcess(ray, "rank 0"), ReadingProcess(ray, "rank 1")
    first.state = second.state = Reading("loading weights", 7, 7)
    watch, board = watch_of(ray, first, second), Recorder()

    def read(done: int) -> None:
        first.state, second.state = Reading("checkpoint", done, 10), Reading("checkpoint", 2 * done, 40)

    ray.after(2.0, lambda: read(4))
    ray.after(4.0, lambda: read(10))
    with shown_reads(board, watch, [first, second]):
        watch.get([ray.call(8.0)])
    assert board.seen == [("checkpoint", 12, 50, "bytes"), ("checkpoint", 30, 50, "bytes"), ("checkpoint",)]


def test_answers_of_dead_and_slow_processes_do_not_wait(ray: Ray) -> None:
    living, slow, dead = (Process(ray, name) for name in ("living", "slow", "dead"))
    calls = {living: lambda: living.ended(1), slow: slow.open_call, dead: dead.open_call}
    answers = polls.Answers[int](lambda: [living, slow, dead], lambda process: calls[process]())
    assert answers.update() == {}
    dead.die()
    assert answers.update() == {living: 1}
    assert len(slow.open) == 1, "one call at a time"


def test_polls_stop_with_their_block_and_without_board(ray: Ray) -> None:
    watch, count = watch_of(ray, Process(ray)), list[int]()
    with watch.polling(lambda: count.append(1)):
        watch.get([ray.call(3.0)])
    polled = len(count)
    assert 4 <= polled <= 7  # every SECONDS_BETWEEN_LOOKS
    with shown_set_up(None, watch) as begun, shown_reads(None, watch):
        begun({})
        watch.get([ray.call(3.0)])
    assert len(count) == polled


class PolledWatch(DyingWatch):
    """Watch that polls in every wait."""

    poll: Callable[[], None] = staticmethod(lambda: None)

    @contextlib.contextmanager
    def polling(self, poll: Callable[[], None]) -> Iterator[None]:
        self.poll = poll  # type: ignore[method-assign]
        yield
        self.poll = lambda: None  # type: ignore[method-assign]

    def wait(self, calls: Sequence[object], num_returns: int) -> tuple[list[object], list[object]]:
        waited = super().wait(calls, num_returns)
        self.poll()
        return waited


class Counts:
    """Call of EngineProcess.num_ended that has ended: one of the SAMPLES responses of each task has ended."""

    def __init__(self, process: engines.Process) -> None:
        self.process_id = id(process)
        self.answer = {number: 1 for number, _ in process.left}


def pool_with_board(monkeypatch: pytest.MonkeyPatch, watch: PolledWatch, num_engines: int, **options: Any) -> Scheduler:
    """Return a scheduler whose engines answer at once."""

    def get(call: Counts) -> dict[int, int]:
        if call.process_id in watch.dead:
            raise ActorDiedError
        return call.answer

    monkeypatch.setattr(polls, "ray", SimpleNamespace(wait=lambda calls, **_: (calls, []), get=get))
    monkeypatch.setattr(polls, "SECONDS_PER_PROCESS", 0.0)
    monkeypatch.setattr(engines.Process, "num_ended", lambda process: Counts(process), raising=False)
    return scheduler_over(watch, num_engines, **options)


@pytest.mark.parametrize("dying", [{}, {3: ["engine 0"]}])
def test_responses_of_unfinished_tasks_are_counted(
    monkeypatch: pytest.MonkeyPatch, dying: dict[int, list[str]]
) -> None:
    board = Recorder()
    pool = pool_with_board(monkeypatch, PolledWatch(dict(dying)), 2, stages=Stages(board=board))
    assert groups(pool.run(tasks_of(12))) == ALL
    title, total = "finished responses", 12 * SAMPLES
    assert board.seen[0] == (title, 0, total, "responses")
    assert board.seen[-1] == (title,)
    counts = [int(str(seen[1])) for seen in board.seen[:-1]]
    assert counts[-1] == total
    assert any(count % SAMPLES for count in counts), "responses of unfinished tasks are counted"
    if not dying:
        assert counts == sorted(counts)


def test_responses_failed_run_ends_their_work(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Recorder()
    pool = pool_with_board(monkeypatch, PolledWatch({2: ["engine 0"]}), 1, max_restarts=0, stages=Stages(board=board))
    with pytest.raises(WorkerDiedError):
        pool.run(tasks_of(12))
    assert board.seen[-1] == ("finished responses",)
