"""A stream over engines that are not there, and what ends in its waits, for tests of either."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from mcore_rl.errors import WorkerDiedError
from mcore_rl.runtime.delivery import Chunk
from mcore_rl.runtime.engines.process import EngineReport
from mcore_rl.runtime.engines.scheduler import Scheduler
from mcore_rl.types import RolloutResult, RolloutTask, SamplingOptions
from tests.unit.runtime.engines import Begin, Call, Process, Watch, scalars_of, scheduler_over

MOST_WAITS = 10_000
"""Who waits more often would wait without end."""


class StreamWatch(Watch):
    """Tasks end when the test says so; with a seed, some end in each wait, on some engines, in any order."""

    attendant: Scheduler
    scalars_of = staticmethod(scalars_of)

    def __init__(self, seed: int | None) -> None:
        super().__init__()
        self.random = None if seed is None else random.Random(seed)
        self.waits, self.busy_seconds = 0, 0.0
        self.ended_early = 0
        """Requests of tasks that have not ended, of whatever engine reports next."""
        self.killed: dict[int, str] = {}
        """Processes that are dead, whether or not anybody has noticed it (`dead`), by id."""
        self.answers: dict[Call, EngineReport] = {}
        """Of waiting calls that have ended, and have not been looked at."""

    def kill(self, name: str, *, noticed: bool = True) -> None:
        self.killed[id(self.present(name))] = f"{name} died: killed"
        if noticed:
            self.blame_the_dead()

    def blame_the_dead(self, handles: Sequence[object] = ()) -> None:
        those = {id(handle) for handle in handles} or set(self.killed)
        self.dead |= {process: why for process, why in self.killed.items() if process in those}

    def waiting_call(self, process: Process) -> Call:
        """The one that waits until something ends there."""
        of_process = [call for call in self.attendant.calls() if call.process_id == id(process)]
        [call] = [call for call in of_process if not isinstance(call, Begin)]
        return call

    def finish(self, name: str, *places: int) -> Call:
        """The waiting call of an engine, in which the tasks in these places of its own have ended."""
        process = self.present(name)
        call = self.waiting_call(process)
        assert call not in self.answers
        ended = [process.left[place] for place in places]
        process.left = [task for task in process.left if task not in ended]
        requests = sum(process.given[key].num_responses for _, key in process.left)
        of_tasks = [(number, key, self.scalars_of(process.given[key])) for number, key in ended]
        self.answers[call] = EngineReport(of_tasks, process.received, requests - self.ended_early, self.busy_seconds, 0)
        return call

    def value(self, call: Call) -> EngineReport | None:
        """Of a call that has ended."""
        if call in self.answers:
            return self.answers.pop(call)
        if call.process_id in self.killed:
            raise WorkerDiedError("a process died")
        assert isinstance(call, Begin)
        return None

    def wait(self, calls: Sequence[object], num_returns: int) -> tuple[list[object], list[object]]:
        self.waits += 1
        assert self.waits < MOST_WAITS
        if self.random is not None:
            self._finish_some(self.random)
        ended = [call for call in self.attendant.calls() if self._has_ended(call)]
        if self.random is not None:
            ended = self.random.sample(ended, self.random.randint(0, len(ended)))
        self.attendant.ended(ended)
        return list(calls), []

    def _finish_some(self, chance: random.Random) -> None:
        for call in self.attendant.calls():
            process = self.process(call.process_id)
            count = chance.randint(0, len(process.left))
            if count and process is self.present(process.name) and not self._has_ended(call):
                self.finish(process.name, *chance.sample(range(len(process.left)), count))

    def _has_ended(self, call: Call) -> bool:
        return isinstance(call, Begin) or call in self.answers or call.process_id in self.killed


class Once(dict[int, RolloutResult]):
    """Takes each result once."""

    def __setitem__(self, ticket: int, result: RolloutResult) -> None:
        assert ticket not in self
        super().__setitem__(ticket, result)


def stream_of(num_engines: int, *, seed: int | None = None, **options: Any) -> tuple[Scheduler, StreamWatch]:
    watch = StreamWatch(seed)
    return scheduler_over(watch, num_engines, slots_per_engine=8, streaming=True, **options), watch


def task_of(number: int, requests: int = 1, prompt_set: str = "train") -> RolloutTask:
    rows = np.array([number])
    return RolloutTask(prompt_set, rows, rows, requests, SamplingOptions(8), 1, f"part {number}")


def begin(stream: Scheduler, sizes: Sequence[int], results: dict[int, RolloutResult]) -> dict[int, RolloutTask]:
    """Tasks of so many requests, by ticket."""
    tasks = [task_of(number, requests) for number, requests in enumerate(sizes)]
    return {stream.begin(task, results): task for task in tasks}


def finish_all(stream: Scheduler, watch: StreamWatch) -> None:
    """All tasks that engines have end at once."""
    processes = [engine.process for engine in stream.fleet.engines if engine.process.left]
    calls = [watch.finish(process.name, *range(len(process.left))) for process in processes]
    stream.ended(calls)


def tickets(watch: StreamWatch) -> list[list[int]]:
    """Of the tasks that each engine has."""
    return [[ticket for ticket, _ in start.leader.left] for start in watch.starts]


def producers(results: dict[int, RolloutResult]) -> dict[int, str]:
    return {ticket: cast(Chunk, chunk).parts[0].place.producer for ticket, (chunk, _) in results.items()}


def supply(stream: Scheduler) -> None:
    """As a publish does."""
    stream.fleet.mark_supplied(stream.fleet.up())
