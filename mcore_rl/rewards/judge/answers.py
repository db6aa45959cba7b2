"""Interface of models that answer judge questions, and its implementation on one of the run's own engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from mcore_rl.config.reward import JudgeConfig
from mcore_rl.data.transcripts import TextDecoder
from mcore_rl.ports import Engine
from mcore_rl.rewards.judge.prompts import JudgePrompts
from mcore_rl.types import Completion, GenerationRequest, Prompt, SamplingOptions


@dataclass(frozen=True)
class JudgeQuestion:
    """A request to judge one response; `seeds` has one entry per requested answer."""

    prompt: Prompt
    response: str
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Reply:
    """One answer to a question.

    finish_reason: see Completion; None if the request failed, with the reason in `error`.
    asked: False if the question was too long and no request was sent.
    score: None if the answer has no score, with the reason in `error`; set by the Judge.
    """

    text: str
    tokens: int
    finish_reason: str | None
    error: str | None = None
    asked: bool = True
    score: float | None = None


class Answerer(Protocol):
    """A language model that answers questions."""

    def replies(self, questions: Sequence[JudgeQuestion]) -> list[list[Reply]]:
        """Return one list per question with one reply per seed, in order; a question that is too long has one reply.

        Raises: DataError if the chat template rejects a question.
        """

    def awake(self) -> AbstractContextManager[None]:
        """Keep the model in memory while the context is open."""


def too_long(num_tokens: int, limit: int) -> Reply:
    """Return the reply to a question that exceeds judge.max_prompt_tokens."""
    message = f"the question has {num_tokens} tokens, judge.max_prompt_tokens is {limit}"
    return Reply("", 0, None, message, asked=False)


class EngineAnswerer:
    """An inference engine with the judge's model and its `tokenizer`. Not safe for concurrent calls.

    The engine sleeps between calls. On GPUs this frees memory. On all devices it clears the prefix cache, so that a
    resumed run gets the same answers as an uninterrupted one.
    """

    def __init__(self, engine: Engine, prompts: JudgePrompts, tokenizer: TextDecoder, config: JudgeConfig) -> None:
        self.engine = engine
        self._prompts, self._tokenizer, self._limit = prompts, tokenizer, config.max_prompt_tokens
        self._sampling = SamplingOptions(config.max_response_tokens, config.temperature, config.top_p)

    def replies(self, questions: Sequence[JudgeQuestion]) -> list[list[Reply]]:
        encoded = self._prompts.encode([self._prompts.render(each.prompt, each.response) for each in questions])
        requests = [
            GenerationRequest(f"{index}.{nth}", ids, seed, self._sampling)
            for index, (question, ids) in enumerate(zip(questions, encoded, strict=True))
            if len(ids) <= self._limit
            for nth, seed in enumerate(question.seeds)
        ]
        written: dict[str, Reply] = {}
        if requests:
            self.engine.generate(requests, lambda each: written.update({each.request_id: self._reply(each)}))
        return [
            [written[f"{index}.{nth}"] for nth in range(len(question.seeds))]
            if len(ids) <= self._limit
            else [too_long(len(ids), self._limit)]
            for index, (question, ids) in enumerate(zip(questions, encoded, strict=True))
        ]

    @contextmanager
    def awake(self) -> Iterator[None]:
        for part in ("weights", "kv_cache"):
            self.engine.wake_up(part)
        yield
        self.engine.sleep(keep_weights=True)

    def _reply(self, completion: Completion) -> Reply:
        text = self._tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True)
        return Reply(text, len(completion.token_ids), completion.finish_reason)
