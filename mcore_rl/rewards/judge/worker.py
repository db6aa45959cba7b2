"""One judge beside its engine: reads the responses of rollout tasks, scores them, and keeps what it
said for the tasks' records."""

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
    """What a judge scores of one task, number `task`. `samples` number the responses of a group; `records` as in the
    task.

    Shapes: group_ids, samples int64 [b].
    """

    task: int
    part: TaskPart
    group_ids: np.ndarray
    samples: np.ndarray
    records: str | None


def shares(tasks: Sequence[RolloutTask], results: Sequence[RolloutScalars], num_judges: int) -> list[list[Share]]:
    """For every judge what it scores of each task of which it has a response, all of about as many tokens."""
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
    """`prompts` are the prompt sets by name, `decoder` is the policy's tokenizer. Not safe for concurrent calls."""

    judge: Judge
    prompts: Mapping[str, PromptSource]
    decoder: TextDecoder
    stop: Sequence[str] = ()
    """rollout.stop: judges see the text before them."""

    def score(
        self, given: Sequence[Share], trajectories: TrajectoryBuffers
    ) -> tuple[dict[int, float], dict[str, Metric]]:
        """Scores by number (TaskPart), and figures of the answers; trajectories are those of the shares, one after
        the other."""
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
