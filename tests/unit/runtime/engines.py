"""Fake engines and a fake Watch for tests of the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from mcore_rl.rollout.tasks import GivenUp, Tail, Until, share
from mcore_rl.runtime.calls import ProcessHandle
from mcore_rl.runtime.engines.fleet import Fleet, FleetEngine
from mcore_rl.runtime.engines.process import EngineProcess
from mcore_rl.runtime.engines.scheduler import Scheduler
from mcore_rl.types import RolloutResult, RolloutScalars, RolloutTask, SamplingOptions
from tests.unit import rollouts

SAMPLES = 2


@dataclass(frozen=True)
class Call:
    """Call of a process. The test decides when it ends."""

    process_id: int
    number: int


class Run(Call):
    """Call of EngineProcess.run."""


class Begin(Call):
    """Call of EngineProcess.begin."""


@dataclass(frozen=True)
class GiveUp(Call):
    """Call of EngineProcess.give_up."""

    free: int


class Process(ProcessHandle[EngineProcess]):
    """Handle of a fake engine's process. It records its calls; the fake Watch decides when they end. The oldest task
    and all that it had at its last report have started."""

    def __init__(self, name: str) -> None:
        super().__init__(name, cast(Any, None))
        self.released = list[int]()
        self.runs = self.received = self.begun = self.asked = self.answers = self.begins = self.sleeps = 0
        self.given: list[RolloutTask] = []
        self.left: list[tuple[int, int]] = []
        """Number and key of unfinished tasks."""

    def call(self, method: Callable[..., object], *arguments: object, **options: object) -> Any:
        return getattr(self, method.__name__)(*arguments)

    def run(self, tasks: list[tuple[int, RolloutTask]], until: Until, released: list[int]) -> object:
        self.take(tasks)
        self.released.extend(released)
        self.runs += 1
        return Run(id(self), self.runs)

    def begin(self, tasks: list[tuple[int, RolloutTask]]) -> object:
        self.take(tasks)
        self.begins += 1
        return Begin(id(self), self.begins)

    def give_up(self, free: int) -> object:
        self.asked += 1
        return GiveUp(id(self), self.asked, free)

    def sleep(self, keep_weights: bool) -> object:
        self.sleeps += 1
        return 0

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

    def take(self, tasks: list[tuple[int, RolloutTask]]) -> None:
        for number, task in tasks:
            self.received += task.num_responses
            self.left.append((number, len(self.given)))
            self.given.append(task)


class Engine(FleetEngine):
    """Engine with fake processes; `all` has the replaced ones too."""

    process: Process

    def __init__(self, number: int) -> None:
        self.all, self.killed = list[Process](), list[Process]()
        super().__init__(number, f"engine {number}", [], [], cast(Any, None), "", None)

    def __post_init__(self) -> None:
        self.replace_processes()

    @property
    def journal(self) -> str:
        return f"{self.name}.{len(self.all)}"

    def kill(self) -> None:
        self.killed.append(self.process)

    def replace_processes(self) -> Any:
        self.process = Process(self.name)
        self.all.append(self.process)
        return f"{self.name} starts"


class Watch:
    """Fake Watch. The processes in `dead` (by id) have died. Subclasses decide what ends in a wait."""

    def __init__(self) -> None:
        self.dead: dict[int, str] = {}
        self.engines: list[Engine] = []
        self.slow: set[str] = set()
        """Engines whose set-up ends only in `get_started`."""

    def process(self, process_id: int) -> Process:
        return next(p for engine in self.engines for p in engine.all if id(p) == process_id)

    def present(self, name: str) -> Process:
        """Return the current process with this name."""
        return next(engine for engine in self.engines if engine.name == name).process

    @property
    def lost(self) -> dict[Process, str]:
        return {self.process(process_id): why for process_id, why in self.dead.items()}

    def blame_the_dead(self, handles: Sequence[object] = ()) -> None: ...

    def get_started(self, starts: Mapping[object, Sequence[Process]]) -> None:
        self.slow -= {process.name for processes in starts.values() for process in processes}

    def start_deadline(self) -> float:
        return 0.0

    def has_started(self, start: object, handles: Sequence[Process], deadline: float) -> bool:
        return handles[0].name not in self.slow


def scalars_of(task: RolloutTask) -> RolloutScalars:
    rows, samples = slice(*task.span), task.samples_per_prompt
    prompt_rows = np.repeat(task.prompt_rows, samples)[rows]
    return rollouts.scalars_of(np.repeat(task.group_ids, samples)[rows], prompt_rows=prompt_rows)


def tasks_of(count: int) -> list[RolloutTask]:
    return [
        RolloutTask("train", np.array([i]), np.array([i]), SAMPLES, SamplingOptions(8), 1, f"part {i}")
        for i in range(count)
    ]


def scheduler_over(
    watch: Watch, num_engines: int, *, max_restarts: int = 3, note: Callable[[str], None] = str, **options: Any
) -> Scheduler:
    watch.engines = [Engine(number) for number in range(num_engines)]
    fleet = Fleet([*watch.engines], cast(Any, watch), max_restarts, note)
    options = {"slots_per_engine": 2, "supply": lambda: fleet.mark_supplied(fleet.up())} | options
    return Scheduler(fleet, **options)


def groups(results: Sequence[RolloutResult]) -> list[list[int]]:
    return [scalars.group_ids.tolist() for _, scalars in results]
