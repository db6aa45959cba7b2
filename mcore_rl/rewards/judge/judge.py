"""Scoring of responses by a language model.

    response --template--> question --answerer--> judge.samples answers --reader--> scores --mean--> score

Answers without a score and responses whose question is too long score judge.unparsable. Metrics count both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mcore_rl.config.reward import JudgeConfig
from mcore_rl.data.seeds import request_seeds
from mcore_rl.data.transcripts import Transcript
from mcore_rl.rewards.judge.answers import Answerer, JudgeQuestion, Reply
from mcore_rl.rewards.judge.scores import CUT, NoScoreError, Reader
from mcore_rl.rewards.task_parts import TaskPart, TranscriptReader, add_to_records
from mcore_rl.types import Mean, Metric, Prompt, TrajectoryBuffers


@dataclass(frozen=True)
class JudgeVerdict:
    """The answers about one response and their mean score."""

    score: float
    answers: tuple[Reply, ...]

    def record(self) -> dict[str, object]:
        """Return the judge's fields of the response's record."""
        names = ("text", "tokens", "finish_reason", "score", "error")
        return {"judge": [{name: getattr(answer, name) for name in names} for answer in self.answers]}


@dataclass(frozen=True)
class Judge:
    """A judge model that scores trajectories. Not safe for concurrent calls.

    read: extracts the score from an answer. trajectories: reader of the trajectories. seed: the run's seed.
    """

    answerer: Answerer
    read: Reader
    trajectories: TranscriptReader
    config: JudgeConfig
    seed: int

    def score(
        self, parts: Sequence[TaskPart], trajectories: TrajectoryBuffers
    ) -> tuple[dict[int, float], dict[str, Metric]]:
        """Score the responses of all parts and add the answers to the tasks' records; returns scores by number (see
        TaskPart) and metrics of the answers.

        `trajectories` holds the parts' trajectories, one part after the other.
        """
        verdicts = self.verdicts(
            self.trajectories.read(parts, trajectories),
            np.concatenate([part.group_ids for part in parts]),
            np.concatenate([part.samples for part in parts]),
        )
        add_to_records(parts, [verdict.record() for verdict in verdicts])
        numbers = np.concatenate([part.numbers for part in parts]).tolist()
        return {n: verdict.score for n, verdict in zip(numbers, verdicts, strict=True)}, describe(verdicts)

    def verdicts(
        self, transcripts: Sequence[Transcript], group_ids: np.ndarray, samples: np.ndarray
    ) -> list[JudgeVerdict]:
        """Judge transcripts; returns one verdict per transcript, in order.

        Sampling seeds depend only on a response's group and its number in the group. The composition of a call thus
        changes the answers by rounding only.

        Shapes: group_ids, samples int64 [B].
        Raises: DataError if the judge's chat template rejects a question; RewardError if too many requests fail.
        """
        questions = [
            JudgeQuestion(each.prompt, each.response, self._seeds(int(group), int(sample)))
            for each, group, sample in zip(transcripts, group_ids, samples, strict=True)
        ]
        return [
            self._verdict([self._scored(question.prompt, reply) for reply in replies])
            for question, replies in zip(questions, self.answerer.replies(questions), strict=True)
        ]

    def _seeds(self, group: int, sample: int) -> tuple[int, ...]:
        """Return one seed per answer. All answers of a group have different seeds, except for chance collisions."""
        count = self.config.samples
        seeds: list[int] = request_seeds(self.seed, np.array([group]), (sample + 1) * count).tolist()
        return tuple(seeds[-count:])  # the seeds before belong to the group's earlier responses

    def _scored(self, prompt: Prompt, reply: Reply) -> Reply:
        if reply.finish_reason is None:
            return reply
        try:
            return replace(reply, score=self.read(prompt, reply))
        except NoScoreError as error:
            return replace(reply, error=str(error))

    def _verdict(self, answers: Sequence[Reply]) -> JudgeVerdict:
        scores = [self.config.unparsable if each.score is None else each.score for each in answers]
        return JudgeVerdict(float(np.mean(scores)), tuple(answers))


def describe(verdicts: Sequence[JudgeVerdict]) -> dict[str, Metric]:
    """Return metrics of the answers. A question that was too long counts as one answer."""
    answers = [answer for verdict in verdicts for answer in verdict.answers]
    asked = [answer for answer in answers if answer.asked]
    given = [answer for answer in asked if answer.finish_reason is not None]
    return {
        "judge/unparsable_fraction": Mean(sum(each.score is None for each in answers), len(answers)),
        "judge/too_long_fraction": Mean(len(answers) - len(asked), len(answers)),
        "judge/failed_fraction": Mean(len(asked) - len(given), len(asked)),
        "judge/clipped_fraction": Mean(sum(each.finish_reason == CUT for each in given), len(given)),
        "judge/response_tokens": Mean(sum(each.tokens for each in given), len(given)),
    }
