"""Grading of all responses of a step in one call of the user's function (reward.batch=step).

Grading starts when the last engine has finished its responses and runs in one of the engine processes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mcore_rl.ports import Rewarder
from mcore_rl.rewards.task_parts import TaskPart, TranscriptReader, add_to_records, by_part
from mcore_rl.types import Score, TrajectoryBuffers, extra_of_turns


class DeferredRewarder:
    """A Rewarder that returns 0 for every response; the rewards follow when the step is graded."""

    def submit(self, *response: object, **batch: object) -> None: ...

    def withdraw(self, key: int, **batch: object) -> None: ...

    def collect(self, keys: Collection[int]) -> dict[int, Score]:
        return {key: Score(0.0, 0.0) for key in keys}

    def shutdown(self) -> None: ...


@dataclass(frozen=True)
class StepGrader:
    """Grader of a whole step. The rewarder must have no other caller: keys are numbered from 0 in every call."""

    rewarder: Rewarder
    reader: TranscriptReader

    def grade(self, parts: Sequence[TaskPart], trajectories: TrajectoryBuffers) -> list[list[Score]]:
        """Grade the responses of all parts; returns one list of scores per part.

        `trajectories` holds the parts' trajectories, one part after the other. Parts and errors of the scores are added
        to the tasks' records.
        """
        transcripts = self.reader.read(parts, trajectories)
        keys = range(len(transcripts))
        # Response tokens: a row contains prompt and response.
        lengths = np.diff(trajectories.token_offsets) - trajectories.prompt_tokens
        for key, transcript, tokens in zip(keys, transcripts, lengths.tolist(), strict=True):
            prompt = replace(transcript.prompt, extra_info={**transcript.prompt.extra_info, **extra_of_turns()})
            self.rewarder.submit(key, prompt, transcript.response, tokens, task=keys)
        by_key = self.rewarder.collect(keys)
        scores = [by_key[key] for key in keys]
        add_to_records(parts, [{**score.parts, "error": score.error} for score in scores])
        return by_part(parts, scores)
