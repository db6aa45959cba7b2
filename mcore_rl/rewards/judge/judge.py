"""Scoring of responses by a language model.

    response --template--> question --answerer--> judge.samples answers --reader--> scores --mean--> score

Answers without a score and responses whose question is too long score judge.unparsable. Metrics count both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mcore_rl.config.reward import JudgeConfig
from mcore_rl.data.seeds import request_seeds
from mcore_rl.data.transcripts import Transcript
from mcore_rl.rewards.judge.answers import Answerer, Question, Reply
from mcore_rl.rewards.judge.scores import CUT, NoScoreError, Reader, Written
from mcore_rl.types import Mean, Metric, Prompt


@dataclass(frozen=True)
class Answer:
    """A reply of the judge and its score; `score` is None if the reply has none, with the reason in `error`."""

    reply: Reply
    score: float | None
    error: str | None

    def record(self) -> dict[str, Any]:
        """Return the fields of the answer in the response's record."""
        reply = self.reply
        return {
            "text": reply.text,
            "tokens": reply.tokens,
            "finish_reason": reply.finish_reason,
            "score": self.score,
            "error": self.error,
        }


@dataclass(frozen=True)
class Verdict:
    """The answers about one response and their mean score."""

    score: float
    answers: tuple[Answer, ...]

    def record(self) -> dict[str, Any]:
        """Return the judge's fields of the response's record."""
        return {"judge": [answer.record() for answer in self.answers]}


@dataclass(frozen=True)
class Judge:
    """A judge model with its score reader. `seed` is the run's seed. Not safe for concurrent calls."""

    answerer: Answerer
    read: Reader
    config: JudgeConfig
    seed: int = field(kw_only=True)

    def verdicts(self, transcripts: Sequence[Transcript], group_ids: np.ndarray, samples: np.ndarray) -> list[Verdict]:
        """Judge transcripts; returns one verdict per transcript, in order.

        Sampling seeds depend only on a response's group and its number in the group. The composition of a call thus
        changes the answers by rounding only.

        Shapes: group_ids, samples int64 [B].
        Raises: DataError if the judge's chat template rejects a question; RewardError if too many requests fail.
        """
        questions = [
            Question(each.prompt, each.response, self._seeds(int(group), int(sample)))
            for each, group, sample in zip(transcripts, group_ids, samples, strict=True)
        ]
        return [
            self._verdict([self._answer(question.prompt, reply) for reply in replies])
            for question, replies in zip(questions, self.answerer.replies(questions), strict=True)
        ]

    def _seeds(self, group: int, sample: int) -> tuple[int, ...]:
        """Return one seed per answer. All answers of a group have different seeds, except for chance collisions."""
        count = self.config.samples
        seeds: list[int] = request_seeds(self.seed, np.array([group]), (sample + 1) * count).tolist()
        return tuple(seeds[-count:])

    def _answer(self, prompt: Prompt, reply: Reply) -> Answer:
        if reply.finish_reason is None:
            return Answer(reply, None, reply.error)
        try:
            return Answer(reply, self.read(Written(reply.text, reply.finish_reason, prompt)), None)
        except NoScoreError as error:
            return Answer(reply, None, str(error))

    def _verdict(self, answers: Sequence[Answer]) -> Verdict:
        scores = [self.config.unparsable if each.score is None else each.score for each in answers]
        return Verdict(float(np.mean(scores)), tuple(answers))


def describe(verdicts: Sequence[Verdict]) -> dict[str, Metric]:
    """Return metrics of the answers. A question that was too long counts as one answer."""
    answers = [answer for verdict in verdicts for answer in verdict.answers]
    asked = [answer.reply for answer in answers if answer.reply.asked]
    given = [reply for reply in asked if reply.finish_reason is not None]
    return {
        "judge/unparsable_fraction": Mean(sum(each.score is None for each in answers), len(answers)),
        "judge/too_long_fraction": Mean(len(answers) - len(asked), len(answers)),
        "judge/failed_fraction": Mean(len(asked) - len(given), len(asked)),
        "judge/clipped_fraction": Mean(sum(each.finish_reason == CUT for each in given), len(given)),
        "judge/response_tokens": Mean(sum(each.tokens for each in given), len(given)),
    }
