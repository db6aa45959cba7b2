"""Task stream without engines: tasks end when a test, or a random choice, lets them end."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from mcore_rl.data.checksum import saved_file
from mcore_rl.rollout.streaming.collector import StreamingCollector
from mcore_rl.rollout.streaming.interface import SavedTasks
from mcore_rl.types import Mean, RolloutResult, RolloutScalars, RolloutTask
from tests.unit.rollout.made import FAILURES, made_scalars, source_of

SAMPLES = 4
SIZE = 4
"""Groups of a step."""


class Stream:
    """`choose` selects the tickets that end in a wait; `dull` the groups with equal rewards. All tokens of an ending
    task have the current `version`."""

    num_engines = 2

    def __init__(self, choose: Callable[[list[int]], Sequence[int]], *, slots: int = 1 << 20) -> None:
        self.choose, self.slots, self.waits, self.version = choose, slots, 0, 0
        self.underway: dict[int, tuple[RolloutTask, dict[int, RolloutResult]]] = {}
        self.begun: list[RolloutTask] = []
        self.dull: Callable[[int], bool] = lambda group: False
        self.most_requests = self.rests = 0
        self.heard: Callable[[], None] = lambda: None

    @property
    def running_requests(self) -> int:
        return sum(task.num_responses for task, _ in self.underway.values())

    def attend(self, heard: Callable[[], None]) -> None:
        self.heard = heard

    def begin(self, task: RolloutTask, results: dict[int, RolloutResult]) -> int:
        ticket = len(self.begun)
        self.begun.append(task)
        self.underway[ticket] = task, results
        self.most_requests = max(self.most_requests, self.running_requests)
        return ticket

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def wait(self) -> None:
        self.waits += 1
        assert self.underway, "it waits, and nothing runs: it would wait for ever"
        self.end(self.choose(sorted(self.underway)))

    def end(self, tickets: Sequence[int]) -> None:
        for ticket in tickets:
            task, results = self.underway.pop(ticket)
            results[ticket] = f"chunk {task.group_ids[0]}", self._scalars(task)  # type: ignore[assignment]
        self.heard()

    def rest(self) -> None:
        self.rests += 1

    def save(self, directory: Path, chunks: Sequence[Any], tickets: Sequence[int]) -> SavedTasks:
        (directory / "engine_0.npz").write_text(json.dumps(list(chunks)))
        (directory / "engine_0.journal").write_text(json.dumps([int(self.begun[i].group_ids[0]) for i in tickets]))
        files = [saved_file(directory, name) for name in ("engine_0.npz", "engine_0.journal")]
        return SavedTasks([("engine_0.npz", index) for index in range(len(chunks))], files)

    def restore(self, path: Path, made: Sequence[tuple[RolloutTask, RolloutScalars]]) -> list[Any]:
        chunks = json.loads(path.read_text())
        assert len(chunks) == len(made)
        return chunks  # type: ignore[no-any-return]

    def idle_fraction(self) -> Mean:
        return Mean(1.0, 4.0)

    def _scalars(self, task: RolloutTask) -> RolloutScalars:
        Path(str(task.records)).write_text(f"{task.group_ids[0]}\n")
        count = task.num_responses
        rewards = np.zeros(count, np.float32)
        rewards[0] = 0 if self.dull(int(task.group_ids[0])) else 1
        versions = np.full((count, 2), self.version, np.int32)
        versions[:, 0] = task.version
        given = {"prompt_rows": np.repeat(task.prompt_rows, count), "rewards": rewards, "accuracies": rewards}
        version_tokens = ((self.version, count),)
        return made_scalars(np.repeat(task.group_ids, count), versions=versions, version_tokens=version_tokens, **given)


def all_of_them(tickets: list[int]) -> list[int]:
    return tickets


def some(seed: int) -> Callable[[list[int]], list[int]]:
    """Return a few random elements."""
    chance = random.Random(seed)
    return lambda tickets: chance.sample(tickets, chance.randint(1, min(3, len(tickets))))


def collector_of(stream: Stream, tmp_path: Path, *, steps: int = 50, **given: object) -> StreamingCollector:
    rollout = {"samples_per_prompt": SAMPLES, "max_staleness": 1, **given.pop("rollout", {})}
    dynamic, failures = given.pop("dynamic", {"enable": False}), given.pop("failures", FAILURES)
    return StreamingCollector(stream, source_of(tmp_path, SIZE, rollout, dynamic, failures), steps, **given)
