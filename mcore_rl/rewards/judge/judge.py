"""A language model that scores responses: (prompt, response) -> question -> engine -> answer -> score.

    response --template--> question --engine--> judge.samples answers --reader--> scores --mean--> score

An answer without a score, and a response whose question is too long, score judge.unparsable, and are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mcore_rl.config.reward import JudgeConfig
from mcore_rl.data.seeds import request_seeds
from mcore_rl.data.transcripts import TextDecoder, Transcript
from mcore_rl.ports import Engine
from mcore_rl.rewards.judge.prompts import JudgePrompts
from mcore_rl.rewards.judge.scores import CUT, NoScoreError, Reader, Written
from mcore_rl.types import Completion, GenerationRequest, Mean, Metric, Prompt, SamplingOptions


@dataclass(frozen=True)
class Answer:
    """What the judge wrote, for the records; `score` is None and `error` says why where it has none.

    Without a finish_reason nothing was asked.
    """

    text: str
    tokens: int
    finish_reason: str | None
    score: float | None
    error: str | None


@dataclass(frozen=True)
class Verdict:
    score: float
    answers: tuple[Answer, ...]

    def record(self) -> dict[str, Any]:
        """Fields of the response's record."""
        return {"judge": [asdict(answer) for answer in self.answers]}


class Judge:
    """Not safe for concurrent calls.

    `tokenizer` is the judge's, `seed` that of the run.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: JudgePrompts,
        tokenizer: TextDecoder,
        read: Reader,
        config: JudgeConfig,
        *,
        seed: int,
    ) -> None:
        self.engine = engine
        self._prompts, self._tokenizer, self._read = prompts, tokenizer, read
        self._config, self._seed = config, seed
        self._sampling = SamplingOptions(config.max_response_tokens, config.temperature, config.top_p)

    def verdicts(self, transcripts: Sequence[Transcript], group_ids: np.ndarray, samples: np.ndarray) -> list[Verdict]:
        """One per transcript, in their order; seeds come from its group and its number in the group, so that what else
        is in the call changes nothing but rounding.

        Shapes: group_ids, samples int64 [B].
        Raises: DataError when the judge's chat template refuses a question.
        """
        questions = self._prompts.encode([self._prompts.render(each.prompt, each.response) for each in transcripts])
        verdicts = [self._not_asked(len(question)) for question in questions]
        asked = [i for i, question in enumerate(questions) if len(question) <= self._config.max_prompt_tokens]
        requests = [
            GenerationRequest(f"{index}.{nth}", questions[index], seed, self._sampling)
            for index in asked
            for nth, seed in enumerate(self._seeds(int(group_ids[index]), int(samples[index])))
        ]
        written = self._generate(requests)
        for index in asked:
            replies = [written[f"{index}.{nth}"] for nth in range(self._config.samples)]
            verdicts[index] = self._verdict([self._answer(transcripts[index].prompt, each) for each in replies])
        return verdicts

    def _seeds(self, group: int, sample: int) -> list[int]:
        """One per answer; no two answers of a group share one but by chance."""
        count = self._config.samples
        seeds: list[int] = request_seeds(self._seed, np.array([group]), (sample + 1) * count).tolist()
        return seeds[-count:]

    def _generate(self, requests: Sequence[GenerationRequest]) -> dict[str, Completion]:
        finished: dict[str, Completion] = {}
        if requests:
            self.engine.generate(requests, lambda completion: finished.update({completion.request_id: completion}))
        return finished

    def _answer(self, prompt: Prompt, completion: Completion) -> Answer:
        text = self._tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True)
        score, message = None, None
        try:
            score = self._read(Written(text, completion.finish_reason, prompt))
        except NoScoreError as error:
            message = str(error)
        return Answer(text, len(completion.token_ids), completion.finish_reason, score, message)

    def _not_asked(self, num_tokens: int) -> Verdict:
        limit = self._config.max_prompt_tokens
        message = f"the question has {num_tokens} tokens, judge.max_prompt_tokens is {limit}"
        return self._verdict([Answer("", 0, None, None, message)])

    def _verdict(self, answers: Sequence[Answer]) -> Verdict:
        scores = [self._config.unparsable if each.score is None else each.score for each in answers]
        return Verdict(float(np.mean(scores)), tuple(answers))


def describe(verdicts: Sequence[Verdict]) -> dict[str, Metric]:
    """Figures of the answers; responses whose question was too long count as one answer that nobody gave."""
    answers = [answer for verdict in verdicts for answer in verdict.answers]
    given = [answer for answer in answers if answer.finish_reason is not None]
    return {
        "judge/unparsable_fraction": Mean(sum(each.score is None for each in answers), len(answers)),
        "judge/too_long_fraction": Mean(len(answers) - len(given), len(answers)),
        "judge/clipped_fraction": Mean(sum(each.finish_reason == CUT for each in given), len(given)),
        "judge/response_tokens": Mean(sum(each.tokens for each in given), len(given)),
    }
