"""Concurrent tasks: each finished task is reported once, when the engine can take more."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.rollout.tasks import GivenUp, RequestCallbacks, Tail, TaskRunner, Until, cut, share
from mcore_rl.types import RolloutTask, SamplingOptions

SECONDS = 20.0


def task(group: int, requests: int) -> tuple[int, RolloutTask]:
    rows = np.arange(requests)
    return group, RolloutTask("train", rows, rows + group, 1, SamplingOptions(4), 1)


class Engine:
    """Fake whose requests start and end when the test decides."""

    def __init__(self) -> None:
        self.progress: dict[int, RequestCallbacks] = {}
        self.unbegun: list[str] = []
        self.withdrawn: list[str] = []
        self.ends: dict[int, threading.Event] = {}
        self.changed = threading.Condition()

    def run(self, task: RolloutTask, progress: RequestCallbacks) -> tuple[Any, Any] | None:
        number, end = int(task.group_ids[0]), threading.Event()
        request_ids = [task.request_id(response) for response in range(*task.span)]
        with self.changed:
            self.progress[number], self.ends[number] = progress, end
            self.unbegun += request_ids
            self.changed.notify_all()
        assert end.wait(SECONDS)
        if {*request_ids} <= {*self.withdrawn}:
            return None
        if number == 13:
            raise LookupError("unlucky")
        return f"buffers {number}", f"scalars {number}"

    def withdraw(self, choose: Callable[[Collection[str]], Collection[str]]) -> None:
        chosen = choose(self.unbegun)
        self.withdrawn += chosen
        self.unbegun = [request_id for request_id in self.unbegun if request_id not in chosen]

    def begin(self, number: int, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: number in self.progress, SECONDS)
        for _ in range(count):
            self.unbegun.remove(next(i for i in self.unbegun if i.split(".")[1].startswith(str(number // 10))))
            self.progress[number].started()

    def end_requests(self, number: int, count: int) -> None:
        for _ in range(count):
            self.progress[number].ended()

    def end(self, number: int) -> None:
        self.begin(number, 0)
        self.ends[number].set()


@pytest.fixture
def caller() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def numbers(call: Future[Any]) -> tuple[list[int], int]:
    finished, _, left = call.result(SECONDS)
    for each in finished:
        assert (each.buffers, each.scalars) == (f"buffers {each.number}", f"scalars {each.number}")
    return sorted(each.number for each in finished), left


@pytest.mark.parametrize(
    ("groups", "engines", "tasks"), [(1, 1, 1), (700, 1, 1), (3, 2, 3), (8, 2, 4), (9, 2, 4), (100, 3, 13)]
)
def test_cut_keeps_groups_whole_and_in_order(groups: int, engines: int, tasks: int) -> None:
    parts = cut(groups, samples=8, num_engines=engines, num_concurrent=128)
    assert np.concatenate(parts).tolist() == list(range(groups))
    assert all(map(len, parts))
    assert len(parts) == tasks
    assert engines == 1 or max(map(len, parts)) <= 128 // 2 // 8


def test_share_balances_waiting_requests_and_keeps_groups_whole() -> None:
    three = [Tail(0, 0, 8, 4), Tail(1, 6, 12, 4)]  # groups of 4, 4; 2, 4
    assert share(three, free=0) == [Tail(1, 6, 12, 4)]
    assert share(three, free=6) == [Tail(1, 6, 12, 4), Tail(0, 4, 8, 4)]
    assert share(three, free=14) == [Tail(1, 6, 12, 4), Tail(0, 0, 8, 4)]
    assert share([Tail(0, 0, 8, 8)], free=0) == [Tail(0, 4, 8, 8)]  # a group larger than what balances
    assert share([Tail(0, 3, 8, 8), Tail(1, 8, 8, 8)], free=0) == [Tail(0, 5, 8, 8)]
    assert share([Tail(0, 7, 8, 8)], free=0) == [Tail(0, 7, 8, 8)]
    assert share([Tail(0, 8, 8, 8)], free=9) == []


@given(
    tails=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=6),
    samples=st.integers(1, 8),
    free=st.integers(0, 60),
)
def test_share_takes_ends_and_no_more_than_balances(tails: list[tuple[int, int]], samples: int, free: int) -> None:
    given_ = [Tail(number, first, first + count, samples) for number, (first, count) in enumerate(tails)]
    shared = share(given_, free)
    waiting, moved = (sum(tail.last - tail.first for tail in some) for some in (given_, shared))
    assert len({tail.task for tail in shared}) == len(shared)
    assert all(given_[t.task].first <= t.first < t.last == given_[t.task].last for t in shared)
    assert (moved > 0) == (waiting > 0)
    assert moved - free <= waiting - moved + 1
    splits = [t for t in shared if t.first % samples and t.first > given_[t.task].first]
    assert len(splits) <= (len(shared) == 1)


def test_task_runner_exchange_returns_when_few_are_left(caller: ThreadPoolExecutor) -> None:
    engine = Engine()
    runner = TaskRunner(engine.run, engine.withdraw, num_threads=4, low=3)
    call = caller.submit(runner.exchange, [task(10, 2), task(20, 3)], until=Until.ASKS)
    engine.begin(10, 2)
    engine.begin(20, 2)
    engine.end_requests(10, 2)
    engine.end(10)
    engine.end_requests(20, 1)
    with pytest.raises(TimeoutError):  # one of them has not begun
        call.result(0.05)
    engine.begin(20, 1)
    finished, left = numbers(call)
    assert left == 2
    call = caller.submit(runner.exchange, [task(30, 2)], until=Until.ASKS)
    engine.begin(30, 2)
    engine.end_requests(20, 2)
    engine.end(20)
    more, left = numbers(call)
    assert left == 2
    call = caller.submit(runner.exchange, [], until=Until.ALL)
    engine.end_requests(30, 2)
    assert not call.done()
    engine.end(30)
    rest, left = numbers(call)
    assert (sorted([*finished, *more, *rest]), left) == ([10, 20, 30], 0)


def test_task_runner_counts_requests_before_tasks_end(caller: ThreadPoolExecutor) -> None:
    engine = Engine()
    runner = TaskRunner(engine.run, engine.withdraw, num_threads=4, low=1)
    call = caller.submit(runner.exchange, [task(10, 3), task(20, 3)], until=Until.ANY)
    engine.begin(10, 3)
    engine.begin(20, 3)
    engine.end_requests(10, 2)
    assert runner.num_left == (2, 4), "a task counts until its last request has ended"
    assert runner.num_ended == {10: 2, 20: 0}
    engine.end_requests(20, 3)
    engine.end(20)
    assert numbers(call) == ([20], 1)
    assert call.result().requests_received == 6
    engine.end_requests(10, 1)
    engine.end(10)
    assert numbers(caller.submit(runner.exchange, [], until=Until.ANY)) == ([10], 0)
    assert runner.num_left == (0, 0)
    assert runner.num_ended == {}


def test_task_runner_exchange_raises_at_once(caller: ThreadPoolExecutor) -> None:
    engine = Engine()
    runner = TaskRunner(engine.run, engine.withdraw, num_threads=4, low=1)
    call = caller.submit(runner.exchange, [task(13, 1), task(20, 1)], until=Until.ALL)
    engine.end(13)
    with pytest.raises(LookupError, match="unlucky"):
        call.result(SECONDS)
    engine.end(20)


def test_task_runner_give_up_takes_unstarted_ends(caller: ThreadPoolExecutor) -> None:
    engine = Engine()
    runner = TaskRunner(engine.run, engine.withdraw, num_threads=4, low=2)
    call = caller.submit(runner.exchange, [task(10, 3), task(20, 2)], until=Until.ASKS)
    engine.begin(10, 1)
    engine.begin(20, 0)
    assert runner.give_up(free=0) == GivenUp([(20, 0)], 2)
    engine.end(20)
    assert runner.give_up(free=1) == GivenUp([(10, 1)], 0)
    assert engine.withdrawn == ["train.20.0", "train.21.0", "train.11.0", "train.12.0"]
    assert runner.give_up(free=9) == GivenUp([], 0)
    assert call.result(SECONDS).requests_left == 1
    call = caller.submit(runner.exchange, [], until=Until.ALL)
    engine.end_requests(10, 1)
    engine.end(10)
    assert numbers(call) == ([10], 0)
    assert [each.request_ids for each in call.result()[0]] == [["train.10.0"]]


def test_task_runner_without_tasks_returns_at_once() -> None:
    assert TaskRunner(Engine().run, Engine().withdraw, num_threads=1, low=1).exchange([], until=Until.ALL) == ([], 0, 0)
