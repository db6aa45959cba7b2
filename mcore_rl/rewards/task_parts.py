"""Splitting of rollout tasks into parts of equal work for data-parallel ranks, and joining of their scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mcore_rl.data.batching import positions_in_groups
from mcore_rl.data.packing import balance
from mcore_rl.errors import NonFiniteError
from mcore_rl.types import RolloutScalars, RolloutTask


@dataclass(frozen=True)
class TaskPart:
    """Responses of one task that a data-parallel rank scores.

    rows: rows of the task's trajectories; numbers: positions of these responses among the responses of all tasks.

    Shapes: prompt_rows, rows, numbers int64 [b].
    """

    prompt_set: str
    prompt_rows: np.ndarray
    rows: np.ndarray
    numbers: np.ndarray


def split_tasks(
    tasks: Sequence[RolloutTask], results: Sequence[RolloutScalars], num_dp_ranks: int
) -> list[list[TaskPart]]:
    """Return one list per data-parallel rank with its part of every task. Parts may be empty.

    Ranks get about equally many tokens.
    """
    starts = np.cumsum([0, *(len(scalars.rewards) for scalars in results)])
    owners = balance(np.concatenate([scalars.total_tokens for scalars in results]), num_dp_ranks)
    of_ranks: list[list[TaskPart]] = [[] for _ in range(num_dp_ranks)]
    for task, scalars, start in zip(tasks, results, starts, strict=False):
        task_owners = owners[start : start + len(scalars.rewards)]
        for dp, of_rank in enumerate(of_ranks):
            rows = np.flatnonzero(task_owners == dp)
            of_rank.append(TaskPart(task.prompt_set, scalars.prompt_rows[rows], rows, rows + start))
    return of_ranks


def join_scores(
    tasks: Sequence[RolloutTask], results: Sequence[RolloutScalars], scores: Mapping[int, float]
) -> list[np.ndarray]:
    """Split scores by number (see TaskPart) into one array per task. Every response has a score.

    Shapes: float32 [B] per task.
    Raises: NonFiniteError naming the first response whose score is not finite.
    """
    whole = np.array([scores[number] for number in range(len(scores))], np.float32)
    ends = np.cumsum([len(scalars.rewards) for scalars in results])
    assert len(whole) == ends[-1], f"{len(whole)} scores for {ends[-1]} responses"
    joined = np.split(whole, ends[:-1])
    for task, scalars, task_scores in zip(tasks, results, joined, strict=True):
        _require_finite(task, scalars, task_scores)
    return joined


def _require_finite(task: RolloutTask, scalars: RolloutScalars, scores: np.ndarray) -> None:
    bad = np.flatnonzero(~np.isfinite(scores))
    if not len(bad):
        return
    index = int(bad[0])
    sample = positions_in_groups(scalars.group_ids)[index]
    more = f"; further scores that are not finite: {len(bad) - 1}" if len(bad) > 1 else ""
    raise NonFiniteError(
        f"the reward model's score of group {scalars.group_ids[index]}, sample {sample} (row "
        f"{scalars.prompt_rows[index]} of data.{task.prompt_set}) is {scores[index]}{more}"
    )
