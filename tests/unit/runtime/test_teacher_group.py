"""Group of teachers on engines or servers: shares of work, and scores by data-parallel rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from mcore_rl.errors import McoreRLError
from mcore_rl.runtime.phases import Stages
from mcore_rl.runtime.roles.teacher import ScoredSamples, TeacherGroup, _wanted, assign
from mcore_rl.runtime.trajectory_store import FetchRequest
from mcore_rl.types import Batch, TrajectoryBuffers
from tests.unit.rollouts import batch_of
from tests.unit.runtime.made import EndedWatch, chunk


@dataclass
class Teacher:
    """Handle of a fake process. `fetch` returns the rows; the reference of a column is (teacher, [(sample, row)])."""

    name: int
    calls: list[list[ScoredSamples]] = field(default_factory=list)

    def call(self, method: Callable[..., object], *arguments: object) -> object:
        return getattr(self, method.__name__)(*arguments)

    call_for_two = call

    def score(self, parts: list[ScoredSamples], rows: list[int]) -> list[Any]:
        self.calls.append(parts)
        return [
            (self.name, part.teacher, [(s, rows[r]) for s, r in zip(part.samples.tolist(), part.rows, strict=True)])
            for part in parts
        ]

    def fetch(self, request: FetchRequest) -> tuple[None, list[int]]:
        return None, request.rows.tolist()


def batch(dp_ranks: list[int], tokens: list[int], teachers: list[int] | None = None) -> Batch:
    """A batch of one chunk whose response b is row b."""
    size = len(dp_ranks)
    made = batch_of([0] * size)
    columns = {"total_tokens": np.array(tokens, np.int32), "trained_tokens": np.ones(size, np.int32)}
    columns |= {"dp_ranks": np.array(dp_ranks, np.int32), "rows": np.arange(size, dtype=np.int32)}
    columns |= {"chunk_ids": np.zeros(size, np.int32)}
    numbers = None if teachers is None else np.array(teachers, np.int32)
    updates = (np.arange(0, size, 2), np.arange(1, size, 2), np.arange(0, size, 2))
    return replace(made, chunks=(chunk("maker", None, 0),), updates=updates, teachers=numbers, **columns)


def scores(given: Batch, processes: int, per_teacher: int) -> tuple[list[list[tuple[int, int, list[int]]]], list[Any]]:
    """Return (process, teacher, samples) of the columns of each rank, after a check of their rows."""
    teachers = [Teacher(number) for number in range(processes)]
    group = TeacherGroup(teachers, EndedWatch(), Stages(), per_teacher, num_dp_ranks=3)  # type: ignore[arg-type]
    by_rank = []
    for columns in group.scores(given).by_rank:
        by_rank.append([(name, teacher, [sample for sample, _ in found]) for name, teacher, found in columns])  # type: ignore[misc, attr-defined]
        assert all(sample == row for _, _, found in columns for sample, row in found)  # type: ignore[misc, attr-defined]
    return by_rank, [teacher.calls for teacher in teachers]


def test_scores_reach_the_rank_of_each_sample_once() -> None:
    by_rank, calls = scores(batch([2, 0, 0, 2, 1, 0], [5, 5, 5, 5, 5, 5]), processes=2, per_teacher=2)
    assert by_rank == [[(0, 0, [1, 2, 5])], [(1, 0, [4])], [(1, 0, [0, 3])]]
    assert [len(of_process) for of_process in calls] == [1, 1]  # one call for all parts


def test_scores_of_sources_come_from_their_engines_only() -> None:
    by_rank, _ = scores(batch([0, 0, 0, 1], [5, 5, 5, 5], [1, -1, 0, 1]), processes=4, per_teacher=2)
    assert by_rank == [[(1, 0, [2]), (2, 1, [0])], [(3, 1, [3])], []]


def test_scores_of_servers_come_from_one_client() -> None:
    by_rank, calls = scores(batch([0, 0, 1], [5, 5, 5], [1, 0, 1]), processes=1, per_teacher=0)
    assert by_rank == [[(0, 0, [1]), (0, 1, [0])], [(0, 1, [2])], []]
    assert len(calls[0]) == 1


def test_assign_balances_tokens_and_skips_untrained_responses() -> None:
    given = batch([0, 0, 0, 0, 0], [10, 10, 10, 30, 7])
    given = replace(given, trained_tokens=np.array([1, 1, 1, 1, 0], np.int32))
    assert assign(given, np.zeros(5, np.int32), 2).tolist() == [0, 0, 0, 1, -1]


def trajectories(temperatures: Any) -> TrajectoryBuffers:
    """A prompt of 2 tokens, and 4 tokens of which the second and the last are not trained."""
    zeros = np.zeros(4, np.float32)
    return TrajectoryBuffers(
        tokens=np.arange(10, 16, dtype=np.int32),
        token_offsets=np.array([0, 6]),
        prompt_tokens=np.array([2], np.int32),
        response_offsets=np.array([0, 4]),
        logp_rollout=zeros,
        versions=zeros.astype(np.int32),
        trained=np.array([1, 0, 1, 0], np.uint8),
        temperatures=temperatures,
    )


@pytest.mark.parametrize("temperatures", [None, np.float32(1), np.array([1, np.nan, 1, 5], np.float32)])
def test_wanted_ends_with_the_last_trained_token(temperatures: Any) -> None:
    sequence, trained = _wanted(trajectories(temperatures), 0)
    assert (sequence.token_ids.tolist(), sequence.start, trained.tolist()) == ([10, 11, 12, 13, 14], 2, [0, 2])


@pytest.mark.parametrize("temperatures", [np.array(0.7, np.float32), np.array([1, np.nan, 0.7, 1], np.float32)])
def test_wanted_rejects_another_temperature(temperatures: Any) -> None:
    with pytest.raises(McoreRLError, match=r"sampled at temperature 0\.7, and teachers on engines or servers"):
        _wanted(trajectories(temperatures), 0)
