"""Answers from an OpenAI-compatible server (judge.url).

Redirects, which openai follows by default, are errors: prompts, responses and the key are for the host of judge.url.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mcore_rl.config.reward import JudgeConfig
from mcore_rl.errors import ConfigError, RewardError
from mcore_rl.rewards.judge.answers import JudgeQuestion, Reply, too_long
from mcore_rl.rewards.judge.prompts import JudgePrompts, Template

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

NO_KEY = "none"
"""Placeholder key without judge.api_key_variable: the client requires a key, which servers without keys ignore."""
TRIAL_TOKENS = 16
MAX_MESSAGE_CHARS = 200


@dataclass(frozen=True)
class ServerAnswerer:
    """An external server. It may return different answers for equal seeds.

    prompts: questions with the judge's tokenizer if judge.tokenizer_path is set; it detects questions that are too
    long and removes control tokens from them.
    key: API key.
    max_failed: fraction of failed requests of a call that ends the run.
    """

    config: JudgeConfig
    template: Template
    prompts: JudgePrompts | None
    model: str
    key: str | None
    max_failed: float

    def replies(self, questions: Sequence[JudgeQuestion]) -> list[list[Reply]]:
        """Send the questions concurrently. A request that fails after judge.max_retries gives a reply without text.

        Raises: RewardError if too many requests fail.
        """
        found = asyncio.run(self._replies(questions))
        asked = [reply for replies in found for reply in replies if reply.asked]
        errors = [reply.error for reply in asked if reply.finish_reason is None]
        if errors and len(errors) >= self.max_failed * len(asked):
            raise RewardError(
                f"judge.url={self.config.url} failed on {len(errors)} of {len(asked)} questions, and "
                f"reward.max_error_fraction={self.max_failed:g} ends the run; the first: {errors[0]}"
            )
        return found

    def awake(self) -> AbstractContextManager[None]:
        """Do nothing: the server manages its own memory."""
        return nullcontext()

    async def _replies(self, questions: Sequence[JudgeQuestion]) -> list[list[Reply]]:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        # Semaphore and client belong to the event loop of this call.
        slots = asyncio.Semaphore(self.config.max_concurrent_requests)
        http = DefaultAsyncHttpxClient(follow_redirects=False)
        async with AsyncOpenAI(**_connection(self.config, self.key), http_client=http) as client:

            async def of_question(question: JudgeQuestion) -> list[Reply]:
                if (reply := self._refused(question)) is not None:
                    return [reply]
                text = self.template.filled(question.prompt, question.response)
                return await asyncio.gather(*(self._ask(client, slots, text, seed) for seed in question.seeds))

            return await asyncio.gather(*map(of_question, questions))

    def _refused(self, question: JudgeQuestion) -> Reply | None:
        if self.prompts is None:
            return None
        (ids,) = self.prompts.encode([self.prompts.render(question.prompt, question.response)])
        limit = self.config.max_prompt_tokens
        return too_long(len(ids), limit) if len(ids) > limit else None

    async def _ask(self, client: AsyncOpenAI, slots: asyncio.Semaphore, text: str, seed: int) -> Reply:
        from openai import OpenAIError

        try:
            async with slots:
                given = await client.chat.completions.create(**_request(self.config, self.model, text, seed))
        except OpenAIError as error:
            return Reply("", 0, None, _told(error))
        if not given.choices:
            return Reply("", 0, None, "the server's answer has no choices")
        choice, usage = given.choices[0], given.usage
        said = choice.message.content or ""
        return Reply(said, usage.completion_tokens if usage is not None else 0, choice.finish_reason)


def _request(config: JudgeConfig, model: str, text: str, seed: int) -> dict[str, Any]:
    """Return the arguments of the request for one answer."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": config.max_response_tokens,  # not all servers support the newer max_completion_tokens
        "temperature": config.temperature,
        "top_p": config.top_p,
        "seed": seed,
    }


def _connection(config: JudgeConfig, key: str | None) -> dict[str, Any]:
    """Return the arguments of openai's clients."""
    return {
        "base_url": config.url,
        "api_key": key or NO_KEY,
        "timeout": config.timeout_seconds,
        "max_retries": config.max_retries,
    }


def served_model(config: JudgeConfig, key: str | None) -> str:
    """Return the model name for requests: judge.served_model, or the server's only model.

    Raises: ConfigError if the server does not respond or does not serve exactly one model.
    """
    if config.served_model is not None:
        return config.served_model
    with _client(config, key) as client:
        names = [each.id for each in client.models.list().data]
    if len(names) != 1:
        raise ConfigError(
            f"judge.url={config.url} serves {', '.join(names) or 'nothing'}; name the judge in judge.served_model"
        )
    return names[0]


def try_server(config: JudgeConfig, key: str | None) -> None:
    """Send one short question without retries.

    Raises: ConfigError if the server does not answer it.
    """
    once = replace(config, max_retries=0, max_response_tokens=min(TRIAL_TOKENS, config.max_response_tokens))
    model = served_model(once, key)
    with _client(once, key) as client:
        client.chat.completions.create(**_request(once, model, "Hello", 0))


@contextmanager
def _client(config: JudgeConfig, key: str | None) -> Iterator[OpenAI]:
    """Yield a client of a server that must answer.

    Raises: ConfigError for errors of its requests.
    """
    from openai import DefaultHttpxClient, OpenAI, OpenAIError

    try:
        with OpenAI(**_connection(config, key), http_client=DefaultHttpxClient(follow_redirects=False)) as client:
            yield client
    except OpenAIError as error:
        raise ConfigError(
            f"judge.url={config.url} does not answer: {_told(error)}; set it to the address of an OpenAI-compatible "
            "server, such as http://host:8000/v1, and set judge.served_model and judge.api_key_variable for it"
        ) from None


def _told(error: Exception) -> str:
    """Return the error and its cause as one line, or the target of a redirect."""
    from openai import APIStatusError

    if isinstance(error, APIStatusError) and error.response.has_redirect_location:
        target = error.response.headers["Location"]
        return f"HTTP {error.status_code} redirects to {target}, which is not followed"[:MAX_MESSAGE_CHARS]
    causes = [error, *filter(None, [error.__cause__])]
    said = " ".join(f"{type(each).__name__}: {each}" for each in causes)
    return " ".join(said.split())[:MAX_MESSAGE_CHARS]
