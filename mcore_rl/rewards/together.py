"""Rewards of a step's responses that a user's function sees all together (reward.batch=step): they are graded when the
last engine has written its own, in one of the engines' processes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from mcore_rl.data.records import add_fields
from mcore_rl.data.trajectories import split_rows
from mcore_rl.data.transcripts import PromptSource, TextDecoder, transcripts
from mcore_rl.ports import Rewarder
from mcore_rl.types import Prompt, Score, TrajectoryBuffers, extra_of_turns


class NotYet:
    """A Rewarder of responses that are graded later: each counts 0 until then."""

    def submit(
        self,
        key: int,
        prompt: Prompt,
        response_text: str,
        response_tokens: int,
        *,
        group: Collection[int] = (),
        task: Collection[int] = (),
    ) -> None: ...

    def withdraw(self, key: int, *, group: Collection[int] = (), task: Collection[int] = ()) -> None: ...

    def collect(self, keys: Collection[int]) -> dict[int, Score]:
        return {key: Score(0.0, 0.0) for key in keys}

    def shutdown(self) -> None: ...


@dataclass(frozen=True)
class TaskToGrade:
    """Of one task of the step; `records` as in the task.

    Shapes: prompt_rows int64 [B], of its responses.
    """

    prompt_set: str
    prompt_rows: np.ndarray
    records: str | None


@dataclass(frozen=True)
class Together:
    """`prompts` are the prompt sets by name, `decoder` is the policy's tokenizer. The rewarder serves nobody else."""

    rewarder: Rewarder
    prompts: Mapping[str, PromptSource]
    decoder: TextDecoder
    stop: Sequence[str] = ()
    """rollout.stop: graders see the text before them."""

    def grade(self, given: Sequence[TaskToGrade], trajectories: TrajectoryBuffers) -> list[list[Score]]:
        """Scores of the responses of each task; what graders say besides is kept for the tasks' records. The
        trajectories are those of the tasks, one after the other."""
        chunks = split_rows(trajectories, [len(task.prompt_rows) for task in given])
        read = [
            transcript
            for task, chunk in zip(given, chunks, strict=True)
            for transcript in transcripts(
                chunk, task.prompt_rows, self.prompts[task.prompt_set], self.decoder, self.stop
            )
        ]
        keys = range(len(read))
        lengths = np.diff(trajectories.token_offsets) - trajectories.prompt_tokens
        for key, transcript, tokens in zip(keys, read, lengths.tolist(), strict=True):
            prompt = replace(transcript.prompt, extra_info={**transcript.prompt.extra_info, **extra_of_turns()})
            self.rewarder.submit(key, prompt, transcript.response, tokens, task=keys)
        by_key = self.rewarder.collect(keys)
        left = iter(keys)
        scores = [[by_key[next(left)] for _ in task.prompt_rows] for task in given]
        for task, of_task in zip(given, scores, strict=True):
            if task.records is not None and of_task:
                fields = [{**score.parts, "error": score.error} for score in of_task]
                add_fields(task.records, range(len(of_task)), fields)
        return scores


if TYPE_CHECKING:
    _port: type[Rewarder] = NotYet
