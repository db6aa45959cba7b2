"""Calls to engines about the trajectories that they keep: grades of a whole step, corrections of records, probes, and
checkpoints of rollouts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from mcore_rl.rewards.task_parts import split_tasks
from mcore_rl.rollout.streaming.interface import TRAJECTORIES, SavedTasks
from mcore_rl.runtime.calls import passed
from mcore_rl.runtime.delivery import Chunk, Delivery, Part, Rows, TrajectoryPlace
from mcore_rl.runtime.engines.balance import EngineKey
from mcore_rl.runtime.engines.engine import FleetEngine
from mcore_rl.runtime.engines.fleet import Fleet
from mcore_rl.runtime.engines.process import EngineProcess
from mcore_rl.types import BuffersRef, Grades, RolloutResult, RolloutScalars, RolloutTask


def grade(fleet: Fleet, tasks: Sequence[RolloutTask], results: Sequence[RolloutResult]) -> list[Grades]:
    """Grade all responses together in the graders of one engine, which fetches the trajectories of others."""
    [parts] = split_tasks(tasks, [scalars for _, scalars in results], 1)
    rows = Rows.of([part.rows for part in parts])

    def grade() -> list[Grades]:
        grader = fleet.started()[0].process
        [trajectories] = Delivery([grader], fleet.watch).deliver([chunk for chunk, _ in results], [rows])
        return fleet.watch.get([grader.call(EngineProcess.grade, parts, *map(passed, trajectories))])[0]

    return fleet.retry_on_engine_loss(grade)


def amend(fleet: Fleet, tasks: Sequence[RolloutTask], results: Sequence[RolloutResult]) -> None:
    """Write rewards, accuracies and scores into the records of finished tasks. The work is spread over all engines."""
    changed = [
        (task.records, scalars.rewards, scalars.accuracies, dict(scalars.scores))
        for task, (_, scalars) in zip(tasks, results, strict=True)
        if task.records
    ]

    def amend() -> None:
        # The records are on shared storage, so any engine can write any part.
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
            engine.name: result(engine, own, *found) for engine, own, found in zip(engines, tasks, made, strict=True)
        }

    def result(
        engine: FleetEngine, task: RolloutTask, key: int, scalars: RolloutScalars, busy_seconds: float
    ) -> RolloutResult:
        engine.busy_seconds = busy_seconds
        place = fleet.released.refer(engine.producer, engine.process, key)
        part = Part(place, 0, len(scalars.group_ids), task.span, scalars.digests)
        return BuffersRef(Chunk([part], task, renew)), scalars

    return fleet.retry_on_engine_loss(call)


def save_tasks(
    fleet: Fleet,
    directory: Path,
    chunks: Sequence[Chunk],
    running: Sequence[tuple[RolloutTask, EngineKey | None]],
) -> SavedTasks:
    """Write the trajectories of `chunks` and the sampled tokens of running tasks into the directory."""
    engines, index_of = fleet.engines, {engine.producer: engine.number for engine in fleet.engines}
    keys: list[list[int]] = [[] for _ in engines]
    request_ids: list[list[str]] = [[] for _ in engines]
    places = []
    for chunk in chunks:
        (part,) = chunk.parts  # streaming tasks are not split
        index = index_of[part.place.producer]
        places.append((f"engine_{index}{TRAJECTORIES}", len(keys[index])))
        keys[index].append(part.place.key)
    for task, key in running:
        if key is not None and key == engines[key.number].key:
            request_ids[key.number] += task.request_ids
    calls = [
        engine.process.call(
            EngineProcess.save_tasks,
            str(directory / f"engine_{engine.number}"),
            keys[engine.number],
            request_ids[engine.number],
        )
        for engine in engines
        if keys[engine.number] or request_ids[engine.number]
    ]
    files = [file for of_engine in fleet.watch.get(calls) for file in of_engine]
    return SavedTasks(places, files)


def restore_tasks(fleet: Fleet, engine: FleetEngine, path: Path, request_ids: list[list[str]]) -> list[TrajectoryPlace]:
    """Let an engine keep the trajectories of a file, one entry of `request_ids` per task."""
    (keys,) = fleet.watch.get([engine.process.call(EngineProcess.restore_tasks, str(path), request_ids)])
    return [fleet.released.refer(engine.producer, engine.process, key) for key in keys]
