"""Grading of all responses of a step in one call of the user's function (reward.batch=step).

Grading starts when the last engine has finished its responses and runs in one of the engine processes.
"""

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


class DeferredRewarder:
    """A Rewarder that returns 0 for every response; the rewards follow when the step is graded."""

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
    """Prompt rows of one task's responses. `records`: see RolloutTask.

    Shapes: prompt_rows int64 [B].
    """

    prompt_set: str
    prompt_rows: np.ndarray
    records: str | None


@dataclass(frozen=True)
class StepGrader:
    """Grader of a whole step.

    `prompts` are the prompt sets by name, `decoder` is the policy's tokenizer. The rewarder must have no other caller:
    keys are numbered from 0 in every call.
    """

    rewarder: Rewarder
    prompts: Mapping[str, PromptSource]
    decoder: TextDecoder
    stop: Sequence[str] = ()
    """rollout.stop: text from a stop string on is cut before grading."""

    def grade(self, given: Sequence[TaskToGrade], trajectories: TrajectoryBuffers) -> list[list[Score]]:
        """Grade the responses of all tasks; returns one list of scores per task.

        `trajectories` holds the tasks' trajectories, one task after the other. Parts and errors of the scores are added
        to the tasks' records.
        """
        chunks = split_rows(trajectories, [len(task.prompt_rows) for task in given])
        read = [
            transcript
            for task, chunk in zip(given, chunks, strict=True)
            for transcript in transcripts(
                chunk, task.prompt_rows, self.prompts[task.prompt_set], self.decoder, self.stop
            )
        ]
        keys = range(len(read))
        # rows contain prompt and response
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
    _port: type[Rewarder] = DeferredRewarder
