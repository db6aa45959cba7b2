"""A streaming scheduler over fake engines, and the events in its waits."""

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
"""Limit of waits; more mean an endless loop."""


class StreamWatch(Watch):
    """The test ends tasks with `finish`. With a seed, each wait ends some tasks on some engines in random order."""

    attendant: Scheduler
    scalars_of = staticmethod(scalars_of)

    def __init__(self, seed: int | None) -> None:
        super().__init__()
        self.random = None if seed is None else random.Random(seed)
        self.waits, self.busy_seconds = 0, 0.0
        self.ended_early = 0
        """Requests that the next report counts as finished although their tasks are not."""
        self.killed: dict[int, str] = {}
        """Dead processes by id, including deaths that are not in `dead` yet."""
        self.answers: dict[Call, EngineReport] = {}
        """Results of `run` calls that have ended and have not been collected."""

    def kill(self, name: str, *, noticed: bool = True) -> None:
        self.killed[id(self.present(name))] = f"{name} died: killed"
        if noticed:
            self.blame_the_dead()

    def blame_the_dead(self, handles: Sequence[object] = ()) -> None:
        those = {id(handle) for handle in handles} or set(self.killed)
        self.dead |= {process: why for process, why in self.killed.items() if process in those}

    def waiting_call(self, process: Process) -> Call:
        """Return the process's call of `run`."""
        of_process = [call for call in self.attendant.calls() if call.process_id == id(process)]
        [call] = [call for call in of_process if not isinstance(call, Begin)]
        return call

    def finish(self, name: str, *places: int) -> Call:
        """End the engine's tasks at these places of `left`; return its call of `run`, which ends."""
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
        """Return the result of a call that has ended."""
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
    """Results by ticket; a second result for a ticket fails."""

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
    """Begin one task per size; returns {ticket: task}."""
    tasks = [task_of(number, requests) for number, requests in enumerate(sizes)]
    return {stream.begin(task, results): task for task in tasks}


def finish_all(stream: Scheduler, watch: StreamWatch) -> None:
    """End all tasks of all engines."""
    processes = [engine.process for engine in stream.fleet.engines if engine.process.left]
    calls = [watch.finish(process.name, *range(len(process.left))) for process in processes]
    stream.ended(calls)


def tickets(watch: StreamWatch) -> list[list[int]]:
    """Return the tickets of the unfinished tasks of each engine."""
    return [[ticket for ticket, _ in engine.process.left] for engine in watch.engines]


def producers(results: dict[int, RolloutResult]) -> dict[int, str]:
    return {ticket: cast(Chunk, chunk).parts[0].place.producer for ticket, (chunk, _) in results.items()}


def supply(stream: Scheduler) -> None:
    """Give all engines that are up the current weights, like a publish."""
    stream.fleet.mark_supplied(stream.fleet.up())
