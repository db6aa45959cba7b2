"""Splitting of tasks into balanced parts that contain every response once; scores that are not finite."""

from __future__ import annotations

import numpy as np
import pytest

from mcore_rl.errors import NonFiniteError
from mcore_rl.rewards.task_parts import join_scores, split_tasks
from mcore_rl.types import RolloutScalars, RolloutTask, SamplingOptions
from tests.unit.rollouts import scalars_of

SAMPLES = 2


def task(groups: list[int]) -> RolloutTask:
    ids = np.array(groups, np.int64)
    return RolloutTask("train", ids + 100, ids, SAMPLES, SamplingOptions(8), seed=0)


def scalars(of: RolloutTask, tokens: list[int]) -> RolloutScalars:
    prompt_rows = np.repeat(of.prompt_rows, SAMPLES)
    lengths = np.array(tokens, np.int32)
    return scalars_of(np.repeat(of.group_ids, SAMPLES), prompt_rows=prompt_rows, total_tokens=lengths)


TASKS = [task([3, 4]), task([5])]
RESULTS = [scalars(TASKS[0], [10, 30, 20, 5]), scalars(TASKS[1], [40, 15])]


def test_every_response_is_in_one_part_and_parts_are_in_balance() -> None:
    parts = split_tasks(TASKS, RESULTS, 2)
    numbers = np.concatenate([part.numbers for of_rank in parts for part in of_rank])
    assert sorted(numbers.tolist()) == list(range(6))
    lengths = np.concatenate([each.total_tokens for each in RESULTS])
    work = [sum(int(lengths[part.numbers].sum()) for part in of_rank) for of_rank in parts]
    assert work == [60, 60]
    for of_rank in parts:
        assert len(of_rank) == len(TASKS)
        for part, start, result in zip(of_rank, (0, 4), RESULTS, strict=True):
            assert part.numbers.tolist() == (part.rows + start).tolist()
            assert part.prompt_rows.tolist() == result.prompt_rows[part.rows].tolist()


def test_a_score_that_is_no_number_is_named() -> None:
    scores = dict.fromkeys(range(6), 1.0) | {4: float("inf"), 5: float("nan")}
    with pytest.raises(NonFiniteError, match=r"group 5, sample 0 \(row 105 of data\.train\) is inf; further .*: 1"):
        join_scores(TASKS, RESULTS, scores)
