"""Who answers a judge's questions, and the answers of an engine of the run's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from mcore_rl.config.reward import JudgeConfig
from mcore_rl.data.transcripts import TextDecoder
from mcore_rl.ports import Engine
from mcore_rl.rewards.judge.prompts import JudgePrompts
from mcore_rl.types import Completion, GenerationRequest, Prompt, SamplingOptions


@dataclass(frozen=True)
class Question:
    """About one response; `seeds`, one per answer."""

    prompt: Prompt
    response: str
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Reply:
    """`finish_reason` as in Completion; None: nothing came, and `error` says why. `asked` is False where it was not
    even asked for."""

    text: str
    tokens: int
    finish_reason: str | None
    error: str | None = None
    asked: bool = True


class Answerer(Protocol):
    """A language model that is asked."""

    def replies(self, questions: Sequence[Question]) -> list[list[Reply]]:
        """Of every question a reply per seed, in their order.

        Raises: DataError when a chat template refuses a question.
        """

    def awake(self) -> AbstractContextManager[None]:
        """It has the memory that it needs for as long as this is open."""


def too_long(num_tokens: int, limit: int) -> Reply:
    """To a question that is not asked."""
    message = f"the question has {num_tokens} tokens, judge.max_prompt_tokens is {limit}"
    return Reply("", 0, None, message, asked=False)


class EngineAnswerer:
    """An inference engine with the judge's model. It sleeps but while it is asked: on GPUs others need the memory, and
    everywhere an engine that remembers no earlier prefixes answers a resumed run as it answers an uninterrupted one.

    Not safe for concurrent calls. `tokenizer` is the judge's.
    """

    def __init__(self, engine: Engine, prompts: JudgePrompts, tokenizer: TextDecoder, config: JudgeConfig) -> None:
        self.engine = engine
        self._prompts, self._tokenizer, self._limit = prompts, tokenizer, config.max_prompt_tokens
        self._sampling = SamplingOptions(config.max_response_tokens, config.temperature, config.top_p)

    def replies(self, questions: Sequence[Question]) -> list[list[Reply]]:
        encoded = self._prompts.encode([self._prompts.render(each.prompt, each.response) for each in questions])
        requests = [
            GenerationRequest(f"{index}.{nth}", ids, seed, self._sampling)
            for index, (question, ids) in enumerate(zip(questions, encoded, strict=True))
            if len(ids) <= self._limit
            for nth, seed in enumerate(question.seeds)
        ]
        written = self._generate(requests)
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

    def _generate(self, requests: Sequence[GenerationRequest]) -> dict[str, Reply]:
        finished: dict[str, Reply] = {}
        if requests:
            self.engine.generate(requests, lambda each: finished.update({each.request_id: self._reply(each)}))
        return finished

    def _reply(self, completion: Completion) -> Reply:
        text = self._tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True)
        return Reply(text, len(completion.token_ids), completion.finish_reason)


if TYPE_CHECKING:
    _answers: type[Answerer] = EngineAnswerer
