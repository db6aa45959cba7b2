"""Tasks that were submitted to the scheduler, and their results."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from mcore_rl.data.records import join_pieces, piece_path
from mcore_rl.errors import WorkerDiedError
from mcore_rl.rollout.results import join_scalars
from mcore_rl.runtime.delivery import Chunk, Part, TrajectoryPlace
from mcore_rl.runtime.engines.balance import EngineKey, TaskPiece
from mcore_rl.runtime.engines.fleet import Fleet
from mcore_rl.types import BuffersRef, RolloutResult, RolloutScalars, RolloutTask

Renew = Callable[[Sequence[Chunk]], bool]


@dataclass(frozen=True)
class FinishedPiece:
    """Trajectories and scalars of a piece, and the engine that keeps them."""

    engine: EngineKey
    place: TrajectoryPlace
    scalars: RolloutScalars


@dataclass
class Submission:
    """A task and its finished pieces, by number. `results` receives the result of a task of `Scheduler.begin`; it is
    None for a task of `Scheduler.run`, which returns the result."""

    task: RolloutTask
    results: dict[int, RolloutResult] | None
    pieces: dict[int, FinishedPiece] = field(default_factory=dict)
    since: float = field(default_factory=time.perf_counter)

    def task_of(self, piece: TaskPiece) -> RolloutTask:
        """Return the piece as a task with a records file of its own."""
        task, responses = self.task, (piece.first, piece.last)
        if responses == task.span:
            return task
        records = None if task.records is None else piece_path(task.records, piece.first - task.span[0])
        return replace(task, responses=responses, records=records)

    def finish(self, number: int, piece: FinishedPiece) -> None:
        if self.results is None:  # include the time in the queue, which engines do not count
            seconds = time.perf_counter() - self.since - piece.scalars.seconds_grading
            piece = replace(piece, scalars=replace(piece.scalars, seconds_generating=seconds))
        self.pieces[number] = piece

    def continue_from(self, journal: str | None) -> None:
        """Add the journal of a lost engine to the task."""
        self.task = with_journal(self.task, journal)

    def result(self, pieces: Mapping[int, TaskPiece], renew: Renew) -> RolloutResult:
        """Join the results of `pieces`, which are in the order of the responses."""
        parts, row = [], 0
        for number, piece in pieces.items():
            finished = self.pieces[number]
            num_responses, rows = _num_responses(finished.scalars), len(finished.scalars.group_ids)
            assert num_responses == piece.num_requests, f"{finished.place}: {num_responses} responses of {piece}"
            # Rows count trajectories, spans count responses: an episode can have several trajectories.
            span = piece.first, piece.last
            parts.append(Part(finished.place, row, row + rows, span, finished.scalars.digests))
            row += rows
        # Each piece has written its own file.
        if len(parts) > 1 and self.task.records is not None:
            join_pieces(self.task.records, [part.responses[0] - self.task.span[0] for part in parts])
        scalars = [self.pieces[number].scalars for number in pieces]
        return chunk_of(self.task, parts, renew), scalars[0] if len(scalars) == 1 else join_scalars(scalars)


def with_journal(task: RolloutTask, journal: str | None) -> RolloutTask:
    return task if journal is None else replace(task, journals=(*task.journals, journal))


def chunk_of(task: RolloutTask, parts: list[Part], renew: Renew) -> BuffersRef:
    # No weights arrive while lost trajectories are regenerated, so they must not wait for a version.
    again = replace(task, journals=(), tokens_per_version=None, spans=())
    return BuffersRef(Chunk(parts, again, renew))


def whole_part(place: TrajectoryPlace, task: RolloutTask, scalars: RolloutScalars) -> Part:
    """Return a part with all trajectories of a task, which are in one place."""
    return Part(place, 0, len(scalars.group_ids), task.span, scalars.digests)


def lost_parts(fleet: Fleet, chunks: Sequence[Chunk]) -> list[tuple[Chunk, Part]]:
    """Return the parts whose engine was lost."""
    present = {engine.producer for engine in fleet.engines}
    return [(chunk, part) for chunk in chunks for part in chunk.parts if part.place.producer not in present]


def task_again(fleet: Fleet, chunk: Chunk, part: Part) -> RolloutTask:
    """Return the task that regenerates a lost part. Its records are already written."""
    task = replace(chunk.task, records=None, responses=part.responses)
    return with_journal(task, fleet.journal_of(part.place.producer))


def replace_part(chunk: Chunk, lost: Part, again: BuffersRef) -> None:
    """Replace a lost part with regenerated parts.

    Raises: WorkerDiedError if they differ, for example because tools answered differently.
    """
    parts = cast(Chunk, again).parts
    _require_same(lost, parts)
    moved = [replace(part, first=lost.first + part.first, last=lost.first + part.last) for part in parts]
    chunk.parts = [each for old in chunk.parts for each in (moved if old is lost else [old])]


def _require_same(lost: Part, again: Sequence[Part]) -> None:
    """Check that regenerated responses equal the lost ones, to which the rewards belong."""
    digests = [part.digests for part in again if part.digests is not None]
    if lost.digests is not None and not np.array_equal(lost.digests, np.concatenate(digests)):
        raise WorkerDiedError(
            f"{lost.place.producer} was lost before ranks had fetched its responses, and the regenerated ones differ: "
            "answers of tools or environments are not repeatable, or responses began with earlier weights and their "
            "journal is lost. The run resumes from its last checkpoint"
        )


def _num_responses(scalars: RolloutScalars) -> int:
    """Count the responses; an episode with several trajectories counts once."""
    if scalars.episodes is None:
        return len(scalars.group_ids)
    return len(np.unique(scalars.episodes))
