"""Splitting of rollout tasks into parts of equal work for several processes, and joining of their scores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np

from mcore_rl.data.batching import positions_in_groups
from mcore_rl.data.packing import balance
from mcore_rl.data.records import add_fields
from mcore_rl.data.trajectories import split_rows
from mcore_rl.data.transcripts import PromptSource, TextDecoder, Transcript, transcripts
from mcore_rl.errors import NonFiniteError
from mcore_rl.types import RolloutScalars, RolloutTask, TrajectoryBuffers

T = TypeVar("T")


@dataclass(frozen=True)
class TaskPart:
    """Responses of one task that one process scores.

    rows: rows of the task's trajectories. numbers: positions of these responses among the responses of all tasks.
    samples: numbers of the responses within their groups. records: see RolloutTask.

    Shapes: rows, numbers, prompt_rows, group_ids, samples int64 [b].
    """

    prompt_set: str
    records: str | None
    rows: np.ndarray
    numbers: np.ndarray
    prompt_rows: np.ndarray
    group_ids: np.ndarray
    samples: np.ndarray


@dataclass(frozen=True)
class TranscriptReader:
    """Reader of the trajectories of task parts.

    `prompts` are the prompt sets by name, `decoder` is the policy's tokenizer.
    """

    prompts: Mapping[str, PromptSource]
    decoder: TextDecoder
    stop: Sequence[str] = ()
    """rollout.stop: text from a stop string on is cut."""

    def read(self, parts: Sequence[TaskPart], trajectories: TrajectoryBuffers) -> list[Transcript]:
        """Return the transcripts of all parts. `trajectories` holds their trajectories, one part after the other."""
        chunks = split_rows(trajectories, [len(part.rows) for part in parts])
        return [
            transcript
            for part, chunk in zip(parts, chunks, strict=True)
            for transcript in transcripts(
                chunk, part.prompt_rows, self.prompts[part.prompt_set], self.decoder, self.stop
            )
        ]


def by_part(parts: Sequence[TaskPart], items: Iterable[T]) -> list[list[T]]:
    """Split items, one per response of all parts in order, into one list per part."""
    left = iter(items)
    return [list(islice(left, len(part.rows))) for part in parts]


def add_to_records(parts: Sequence[TaskPart], fields: Iterable[Mapping[str, object]]) -> None:
    """Add fields, one mapping per response of all parts in order, to the tasks' records."""
    for part, own in zip(parts, by_part(parts, fields), strict=True):
        if part.records is not None and own:
            add_fields(part.records, part.rows.tolist(), own)


def split_tasks(
    tasks: Sequence[RolloutTask], results: Sequence[RolloutScalars], num_processes: int
) -> list[list[TaskPart]]:
    """Return one list per process with its part of every task. Parts may be empty.

    Processes get about equally many tokens.
    """
    starts = np.cumsum([0, *(len(scalars.rewards) for scalars in results)])
    owners = balance(np.concatenate([scalars.total_tokens for scalars in results]), num_processes)
    parts: list[list[TaskPart]] = [[] for _ in range(num_processes)]
    # starts has one more entry: the number of all responses
    for task, scalars, start in zip(tasks, results, starts, strict=False):
        task_owners = owners[start : start + len(scalars.rewards)]
        # Sort once, then cut: most parts of a small task are empty.
        order = np.argsort(task_owners, kind="stable")
        values = (scalars.prompt_rows, scalars.group_ids, positions_in_groups(scalars.group_ids))
        columns = [order, order + start, *(each[order] for each in values)]
        ends = np.cumsum(np.bincount(task_owners, minlength=num_processes)).tolist()
        for own, first, last in zip(parts, [0, *ends], ends, strict=False):
            own.append(TaskPart(task.prompt_set, task.records, *(column[first:last] for column in columns)))
    return parts


def join_scores(
    tasks: Sequence[RolloutTask], results: Sequence[RolloutScalars], scores: Mapping[int, float], advice: str = ""
) -> list[np.ndarray]:
    """Split scores by number (see TaskPart) into one array per task. Every response has a score.

    Shapes: float32 [B] per task.
    Raises: NonFiniteError naming the first response whose score is not finite, and ending with `advice`.
    """
    whole = np.array([scores[number] for number in range(len(scores))], np.float32)
    ends = np.cumsum([len(scalars.rewards) for scalars in results])
    assert len(whole) == ends[-1], f"{len(whole)} scores for {ends[-1]} responses"
    joined = np.split(whole, ends[:-1])
    for task, scalars, task_scores in zip(tasks, results, joined, strict=True):
        bad = np.flatnonzero(~np.isfinite(task_scores))
        if len(bad):
            index, more = int(bad[0]), f"; further scores that are not finite: {len(bad) - 1}" if len(bad) > 1 else ""
            raise NonFiniteError(
                f"the reward model's score of group {scalars.group_ids[index]}, sample "
                f"{positions_in_groups(scalars.group_ids)[index]} (row {scalars.prompt_rows[index]} of "
                f"data.{task.prompt_set}) is {task_scores[index]}{more}" + (f". {advice}" if advice else "")
            )
    return joined
