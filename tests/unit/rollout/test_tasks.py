"""Tasks beside each other: what has ended is reported when the engine asks for more, each once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from mcore_rl.rollout.tasks import TaskRunner
from mcore_rl.types import RolloutTask, SamplingOptions

SECONDS = 20.0


def task(group: int, requests: int) -> tuple[int, RolloutTask]:
    rows = np.arange(requests)
    return group, RolloutTask("train", rows, rows + group, 1, SamplingOptions(4), 1)


class Engine:
    """Requests of a task end when the test says so."""

    def __init__(self) -> None:
        self.begun: dict[int, Callable[[], None]] = {}
        self.ends: dict[int, threading.Event] = {}
        self.changed = threading.Condition()

    def run(self, task: RolloutTask, ended: Callable[[], None]) -> tuple[Any, Any]:
        number, end = int(task.group_ids[0]), threading.Event()
        with self.changed:
            self.begun[number], self.ends[number] = ended, end
            self.changed.notify_all()
        assert end.wait(SECONDS)
        if number == 13:
            raise LookupError("unlucky")
        return f"buffers {number}", f"scalars {number}"

    def end_requests(self, number: int, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: number in self.begun, SECONDS)
        for _ in range(count):
            self.begun[number]()

    def end(self, number: int) -> None:
        self.end_requests(number, 0)
        self.ends[number].set()


@pytest.fixture
def caller() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def numbers(call: Future[Any]) -> tuple[list[int], int]:
    finished, left = call.result(SECONDS)
    for each in finished:
        assert (each.buffers, each.scalars) == (f"buffers {each.number}", f"scalars {each.number}")
    return sorted(each.number for each in finished), left


def test_it_asks_for_more_when_few_requests_are_left_and_says_what_has_ended(caller: ThreadPoolExecutor) -> None:
    engine = Engine()
    runner = TaskRunner(engine.run, num_threads=4, low=3)
    call = caller.submit(runner.exchange, [task(10, 2), task(20, 3)], more=True)
    engine.end_requests(10, 2)
    engine.end(10)
    assert not call.done()
    engine.end_requests(20, 1)
    finished, left = numbers(call)
    assert left == 2
    call = caller.submit(runner.exchange, [task(30, 2)], more=True)
    engine.end_requests(20, 2)
    engine.end(20)
    more, left = numbers(call)
    assert left == 2
    call = caller.submit(runner.exchange, [], more=False)
    engine.end_requests(30, 2)
    assert not call.done()
    engine.end(30)
    rest, left = numbers(call)
    assert (sorted([*finished, *more, *rest]), left) == ([10, 20, 30], 0)


def test_what_a_task_raises_is_raised_at_once(caller: ThreadPoolExecutor) -> None:
    engine = Engine()
    runner = TaskRunner(engine.run, num_threads=4, low=1)
    call = caller.submit(runner.exchange, [task(13, 1), task(20, 1)], more=False)
    engine.end(13)
    with pytest.raises(LookupError, match="unlucky"):
        call.result(SECONDS)
    engine.end(20)


def test_without_tasks_nothing_is_waited_for() -> None:
    assert TaskRunner(Engine().run, num_threads=1, low=1).exchange([], more=False) == ([], 0)
