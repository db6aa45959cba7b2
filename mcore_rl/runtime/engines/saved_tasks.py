"""Checkpoints of rollouts: each engine writes and reads the trajectories and unfinished requests that it holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mcore_rl.rollout.streaming.interface import TRAJECTORIES, SavedTasks
from mcore_rl.runtime.delivery import Chunk, TrajectoryPlace
from mcore_rl.runtime.engines.balance import EngineKey
from mcore_rl.runtime.engines.fleet import Fleet, FleetEngine
from mcore_rl.runtime.engines.process import EngineProcess
from mcore_rl.types import RolloutTask


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
