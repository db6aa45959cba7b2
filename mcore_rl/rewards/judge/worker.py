"""Scoring of rollout tasks by one judge; the answers are added to the tasks' records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mcore_rl.data.batching import positions_in_groups
from mcore_rl.data.records import add_fields
from mcore_rl.data.trajectories import split_rows
from mcore_rl.data.transcripts import PromptSource, TextDecoder, transcripts
from mcore_rl.rewards.judge.judge import Judge, describe
from mcore_rl.rewards.task_parts import TaskPart, split_tasks
from mcore_rl.types import Metric, RolloutScalars, RolloutTask, TrajectoryBuffers


@dataclass(frozen=True)
class Share:
    """Responses of one task that a judge scores.

    task: index of the task. samples: numbers of the responses within their groups. records: see RolloutTask.

    Shapes: group_ids, samples int64 [b].
    """

    task: int
    part: TaskPart
    group_ids: np.ndarray
    samples: np.ndarray
    records: str | None


def shares(tasks: Sequence[RolloutTask], results: Sequence[RolloutScalars], num_judges: int) -> list[list[Share]]:
    """Return one list per judge with its shares of the tasks, without empty shares.

    Judges get about equally many tokens.
    """
    return [
        [
            Share(index, part, group_ids[part.rows], positions_in_groups(group_ids)[part.rows], task.records)
            for index, (task, part) in enumerate(zip(tasks, parts, strict=True))
            if len(part.rows)
            for group_ids in [results[index].group_ids]
        ]
        for parts in split_tasks(tasks, results, num_judges)
    ]


@dataclass(frozen=True)
class JudgeWorker:
    """A judge with the data that it needs to read trajectories. Not safe for concurrent calls.

    `prompts` are the prompt sets by name, `decoder` is the policy's tokenizer.
    """

    judge: Judge
    prompts: Mapping[str, PromptSource]
    decoder: TextDecoder
    stop: Sequence[str] = ()
    """rollout.stop: text from a stop string on is cut before judging."""

    def score(
        self, given: Sequence[Share], trajectories: TrajectoryBuffers
    ) -> tuple[dict[int, float], dict[str, Metric]]:
        """Score the responses of all shares; returns scores by number (see TaskPart) and metrics of the answers.

        `trajectories` holds the shares' trajectories, one share after the other.
        """
        parts = [share.part for share in given]
        read = [
            transcripts(buffers, part.prompt_rows, self.prompts[part.prompt_set], self.decoder, self.stop)
            for part, buffers in zip(parts, split_rows(trajectories, [len(part.rows) for part in parts]), strict=True)
        ]
        verdicts = self.judge.verdicts(
            [transcript for of_share in read for transcript in of_share],
            np.concatenate([share.group_ids for share in given]),
            np.concatenate([share.samples for share in given]),
        )
        scores: dict[int, float] = {}
        left = iter(verdicts)
        for share in given:
            share_verdicts = [next(left) for _ in share.part.rows]
            scores |= {int(n): verdict.score for n, verdict in zip(share.part.numbers, share_verdicts, strict=True)}
            if share.records is not None:
                add_fields(share.records, share.part.rows.tolist(), [verdict.record() for verdict in share_verdicts])
        return scores, describe(verdicts)
