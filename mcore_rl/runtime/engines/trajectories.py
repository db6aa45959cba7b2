"""Trajectories that engines keep: grades of a whole step, corrections of records, probes, checkpoints of rollouts, and
the generation of lost trajectories."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import numpy as np

from mcore_rl.errors import McoreRLError, WorkerDiedError
from mcore_rl.rewards.task_parts import split_tasks
from mcore_rl.rollout.streaming.interface import TRAJECTORIES, SavedTasks
from mcore_rl.runtime.calls import passed
from mcore_rl.runtime.delivery import Chunk, Delivery, Part, Rows
from mcore_rl.runtime.engines.balance import EngineKey
from mcore_rl.runtime.engines.fleet import Fleet, FleetEngine
from mcore_rl.runtime.engines.process import EngineProcess
from mcore_rl.runtime.phases import Phase, Stages, staged
from mcore_rl.types import BuffersRef, Grades, RolloutResult, RolloutScalars, RolloutTask
from mcore_rl.types.copies import changed


def _no_supply() -> None:
    raise McoreRLError("engines were lost before any had weights")


@dataclass
class EngineTrajectories(ABC):
    """Trajectories that the engines of `fleet` keep until the driver releases them. `generate` is implemented by the
    scheduler."""

    fleet: Fleet
    supply: Callable[[], None] = field(default=_no_supply, kw_only=True)
    """Publishes the current weights to restarted engines."""
    stages: Stages = field(default_factory=Stages, kw_only=True)
    _restored: int = field(default=0, init=False)
    """Number of files that engines have read; engines take them in turn."""

    @abstractmethod
    def generate(self, tasks: Sequence[RolloutTask]) -> list[RolloutResult]:
        """Generate tasks, each with the weights of its version; results are in the order of the tasks."""

    @staged("grade", None)
    def grade(self, tasks: Sequence[RolloutTask], results: Sequence[RolloutResult]) -> list[Grades]:
        """Grade all responses together in the graders of one engine, which fetches the trajectories of others."""
        fleet = self.fleet
        [parts] = split_tasks(tasks, [scalars for _, scalars in results], 1)
        rows = Rows.of([part.rows for part in parts])

        def grade() -> list[Grades]:
            grader = fleet.started()[0].process
            [trajectories] = Delivery([grader], fleet.watch).deliver([chunk for chunk, _ in results], [rows])
            return fleet.watch.get([grader.call(EngineProcess.grade, parts, *map(passed, trajectories))])[0]

        return fleet.retry_on_engine_loss(grade)

    def amend(self, tasks: Sequence[RolloutTask], results: Sequence[RolloutResult]) -> None:
        """Write rewards, accuracies and scores into the records of finished tasks. The work is spread over all
        engines."""
        changed = [
            (task.records, scalars.rewards, scalars.accuracies, dict(scalars.scores))
            for task, (_, scalars) in zip(tasks, results, strict=True)
            if task.records
        ]

        def amend() -> None:
            # The records are on shared storage, so any engine can write any part.
            engines = zip(itertools.cycle(self.fleet.started()), changed, strict=False)
            calls = [engine.process.call(EngineProcess.amend_records, *columns) for engine, columns in engines]
            self.fleet.watch.get(calls)

        self.fleet.retry_on_engine_loss(amend)

    @staged("probe", Phase.GENERATE)
    def probe(self, task: RolloutTask) -> dict[str, RolloutResult]:
        """Run a task on each engine that has weights, with different group ids each; returns {engine name: result}.
        Metrics of steps do not include it."""
        fleet, shift = self.fleet, len(task.group_ids)

        def probe() -> dict[str, RolloutResult]:
            fleet.reap_failed()
            own = [
                (engine, replace(task, version=fleet.version, group_ids=task.group_ids + number * shift))
                for number, engine in enumerate(fleet.serving)
            ]
            made = fleet.watch.get([engine.process.call(EngineProcess.probe, of_engine) for engine, of_engine in own])
            results = {}
            for (engine, of_engine), (key, scalars, busy_seconds) in zip(own, made, strict=True):
                engine.busy_seconds = busy_seconds
                results[engine.name] = self._kept(engine, key, of_engine, scalars), scalars
            return results

        return fleet.retry_on_engine_loss(probe)

    def restore(self, path: Path, made: Sequence[tuple[RolloutTask, RolloutScalars]]) -> list[BuffersRef]:
        """Read trajectories (see TaskStream.restore)."""
        fleet, request_ids = self.fleet, [task.request_ids for task, _ in made]

        def restore() -> list[BuffersRef]:
            engine = fleet.engines[self._restored % fleet.num_engines]
            self._restored += 1
            [keys] = fleet.watch.get([engine.process.call(EngineProcess.restore_tasks, str(path), request_ids)])
            return [self._kept(engine, key, *one) for key, one in zip(keys, made, strict=True)]

        return fleet.retry_on_engine_loss(restore)

    def save_tasks(
        self,
        directory: Path,
        chunks: Sequence[Chunk],
        running: Iterable[tuple[RolloutTask, EngineKey | None]],
    ) -> SavedTasks:
        """Write the trajectories of `chunks` and the sampled tokens of running tasks into the directory."""
        engines, number_of = self.fleet.engines, {engine.producer: engine.number for engine in self.fleet.engines}
        keys, request_ids = defaultdict[int, list[int]](list), defaultdict[int, list[str]](list)
        places = []
        for chunk in chunks:
            (part,) = chunk.parts  # streaming tasks are not split
            number = number_of[part.place.producer]
            places.append((f"engine_{number}{TRAJECTORIES}", len(keys[number])))
            keys[number].append(part.place.key)
        for task, key in running:
            if key is not None and key == engines[key.number].key:
                request_ids[key.number] += task.request_ids
        calls = [
            engines[number].process.call(
                EngineProcess.save_tasks, str(directory / f"engine_{number}"), keys[number], request_ids[number]
            )
            for number in sorted({*keys, *request_ids})
        ]
        return SavedTasks(places, [file for of_engine in self.fleet.watch.get(calls) for file in of_engine])

    def renew(self, chunks: Sequence[Chunk]) -> bool:
        """Regenerate trajectories that were lost with their engine; return whether there were any. Sleeping engines are
        woken for it and sleep again afterwards."""
        fleet, phases = self.fleet, self.stages.phases
        if not fleet.asleep:
            return self._regenerate(chunks)
        if phases is None or not (fleet.watch.lost or self._lost(chunks)):
            return False
        with phases.interrupted():
            fleet.settle()
            self.supply()
            return self._regenerate(chunks)

    def _regenerate(self, chunks: Sequence[Chunk]) -> bool:
        """Implement `renew`.

        Raises: WorkerDiedError if responses differ, for example because tools answered differently.
        """
        self.fleet.reap_failed()
        lost = self._lost(chunks)
        if not lost:
            return False
        tasks = []
        for chunk, part in lost:
            # The records are already written.
            task = replace(chunk.task, records=None, responses=part.responses)
            tasks.append(with_journal(task, self.fleet.lost_journals.get(part.place.producer)))
        for (chunk, part), (again, _) in zip(lost, self.generate(tasks), strict=True):
            parts = cast(Chunk, again).parts
            _require_same(part, parts)
            moved = [replace(each, first=part.first + each.first, last=part.first + each.last) for each in parts]
            chunk.parts = [each for old in chunk.parts for each in (moved if old is part else [old])]
        return True

    def _lost(self, chunks: Sequence[Chunk]) -> list[tuple[Chunk, Part]]:
        """Return the parts whose engine was lost."""
        present = {engine.producer for engine in self.fleet.engines}
        return [(chunk, part) for chunk in chunks for part in chunk.parts if part.place.producer not in present]

    def _kept(self, engine: FleetEngine, key: int, task: RolloutTask, scalars: RolloutScalars) -> BuffersRef:
        """Return a chunk with all trajectories of a task, which one engine keeps under `key`."""
        place = self.fleet.released.refer(engine.producer, engine.process, key)
        return chunk_of(task, [Part(place, 0, len(scalars.group_ids), task.span, scalars.digests)])


def chunk_of(task: RolloutTask, parts: list[Part]) -> BuffersRef:
    # No weights arrive while lost trajectories are regenerated, so they must not wait for a version.
    return BuffersRef(Chunk(parts, changed(task, journals=(), tokens_per_version=None, spans=())))


def with_journal(task: RolloutTask, journal: str | None) -> RolloutTask:
    """Add the journal of a lost engine to a task, if there is one."""
    return task if journal is None else replace(task, journals=(*task.journals, journal))


def _require_same(lost: Part, again: Sequence[Part]) -> None:
    """Check that regenerated responses equal the lost ones, to which the rewards belong."""
    digests = [part.digests for part in again if part.digests is not None]
    if lost.digests is not None and not np.array_equal(lost.digests, np.concatenate(digests)):
        raise WorkerDiedError(
            f"{lost.place.producer} was lost before ranks had fetched its responses, and the regenerated ones differ: "
            "answers of tools or environments are not repeatable, or responses began with earlier weights and their "
            "journal is lost. The run resumes from its last checkpoint"
        )
