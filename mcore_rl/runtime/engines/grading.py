"""Calls to engines about finished responses: grades of a whole step, corrections of records, and probes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from mcore_rl.rewards.step_grading import TaskToGrade
from mcore_rl.runtime.calls import passed
from mcore_rl.runtime.delivery import Chunk, Delivery, Part, Rows
from mcore_rl.runtime.engines.fleet import Fleet, FleetEngine
from mcore_rl.runtime.engines.process import EngineProcess
from mcore_rl.types import BuffersRef, Grades, RolloutResult, RolloutScalars, RolloutTask


def grade(fleet: Fleet, tasks: Sequence[RolloutTask], results: Sequence[RolloutResult]) -> list[Grades]:
    """Grade all responses together in the graders of one engine, which fetches the trajectories of others."""
    given = [
        TaskToGrade(task.prompt_set, scalars.prompt_rows, task.records)
        for task, (_, scalars) in zip(tasks, results, strict=True)
    ]
    rows = Rows.of([np.arange(len(task.prompt_rows)) for task in given])

    def grade() -> list[Grades]:
        grader = fleet.started()[0].process
        [trajectories] = Delivery([grader], fleet.watch).deliver([chunk for chunk, _ in results], [rows])
        return fleet.watch.get([grader.call(EngineProcess.grade, given, *map(passed, trajectories))])[0]

    return fleet.retry_on_engine_loss(grade)


def amend(fleet: Fleet, tasks: Sequence[RolloutTask], results: Sequence[RolloutResult]) -> None:
    """Write rewards, accuracies and scores into the records of finished tasks. The work is spread over all engines."""
    changed = [
        (task.records, scalars.rewards, scalars.accuracies, dict(scalars.scores))
        for task, (_, scalars) in zip(tasks, results, strict=True)
        if task.records
    ]

    def amend() -> None:
        engines = itertools.cycle(fleet.started())
        fleet.watch.get(
            [
                engine.process.call(EngineProcess.amend_records, *columns)
                for engine, columns in zip(engines, changed, strict=False)
            ]
        )

    fleet.retry_on_engine_loss(amend)


def probe(fleet: Fleet, task: RolloutTask, renew: Callable[[Sequence[Chunk]], bool]) -> dict[str, RolloutResult]:
    """Run a task on every engine that has weights, with different group ids on each. Returns {engine name: result}."""

    def call() -> dict[str, RolloutResult]:
        fleet.reap_failed()
        engines, shift = fleet.serving, len(task.group_ids)
        tasks = [
            replace(task, version=fleet.version, group_ids=task.group_ids + number * shift)
            for number in range(len(engines))
        ]
        made = fleet.watch.get(
            [engine.process.call(EngineProcess.probe, own) for engine, own in zip(engines, tasks, strict=True)]
        )
        return {
            engine.start.name: result(engine, own, *found)
            for engine, own, found in zip(engines, tasks, made, strict=True)
        }

    def result(
        engine: FleetEngine, task: RolloutTask, key: int, scalars: RolloutScalars, busy_seconds: float
    ) -> RolloutResult:
        engine.busy_seconds = busy_seconds
        place = fleet.released.refer(engine.producer, engine.process, key)
        part = Part(place, 0, len(scalars.group_ids), task.span, scalars.digests)
        return BuffersRef(Chunk([part], task, renew)), scalars

    return fleet.retry_on_engine_loss(call)
