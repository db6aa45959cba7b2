"""Tasks that were submitted to the scheduler, and their results."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mcore_rl.data.records import join_pieces, piece_path
from mcore_rl.rollout.results import join_scalars
from mcore_rl.runtime.delivery import Part
from mcore_rl.runtime.engines.balance import TaskPiece
from mcore_rl.runtime.engines.trajectories import chunk_of
from mcore_rl.types import RolloutResult, RolloutScalars, RolloutTask


@dataclass
class Submission:
    """A task. `results` receives the result of a task of `Scheduler.begin`; it is None for a task of `Scheduler.run`,
    which returns the result."""

    task: RolloutTask
    results: dict[int, RolloutResult] | None
    since: float = field(default_factory=time.perf_counter)

    def task_of(self, piece: TaskPiece) -> RolloutTask:
        """Return the piece as a task with a records file of its own."""
        task, responses = self.task, (piece.first, piece.last)
        if responses == task.span:
            return task
        records = None if task.records is None else piece_path(task.records, piece.first - task.span[0])
        return replace(task, responses=responses, records=records)

    def with_queue_time(self, scalars: RolloutScalars) -> RolloutScalars:
        """Include the time in the queue, which engines do not count, for a task of `Scheduler.run`."""
        if self.results is not None:
            return scalars
        seconds = time.perf_counter() - self.since - scalars.seconds_grading
        return replace(scalars, seconds_generating=seconds)

    def result(self, pieces: Sequence[TaskPiece]) -> RolloutResult:
        """Join the results of `pieces`, which are in the order of the responses."""
        parts, scalars, row = [], [], 0
        for piece in pieces:
            assert piece.finished is not None
            found = piece.finished.scalars
            num_responses, rows = _num_responses(found), len(found.group_ids)
            assert num_responses == piece.num_requests, f"{num_responses} responses of {piece}"
            # Rows count trajectories, spans count responses: an episode can have several trajectories.
            parts.append(Part(piece.finished.place, row, row + rows, (piece.first, piece.last), found.digests))
            scalars.append(found)
            row += rows
        # Each piece has written its own file.
        if len(parts) > 1 and self.task.records is not None:
            join_pieces(self.task.records, [part.responses[0] - self.task.span[0] for part in parts])
        return chunk_of(self.task, parts), scalars[0] if len(scalars) == 1 else join_scalars(scalars)


def _num_responses(scalars: RolloutScalars) -> int:
    """Count the responses; an episode with several trajectories counts once."""
    if scalars.episodes is None:
        return len(scalars.group_ids)
    return len(np.unique(scalars.episodes))
