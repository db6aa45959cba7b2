"""OpenAI's client for the sessions of a process."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from mcore_rl.types.chat import ChatMessage

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletionMessageParam

MODEL = "policy"
"""Name of the model in requests; the gateway ignores it."""


@dataclass(frozen=True)
class Endpoint:
    """Address of a session for OpenAI's clients, and its key."""

    url: str
    key: str


def client(endpoint: Endpoint) -> AsyncOpenAI:
    """Return a client of a session. All sessions of a process share its connections."""
    return _client().with_options(base_url=endpoint.url, api_key=endpoint.key)


async def reply(
    endpoint: Endpoint, messages: Sequence[ChatMessage], stop: Sequence[str] = (), max_tokens: int | None = None
) -> str:
    """Return the model's text. stop: strings that end it, which the text excludes. max_tokens: None for the run's."""
    given = cast("list[ChatCompletionMessageParam]", list(messages))
    create = client(endpoint).chat.completions.create
    answer = await create(model=MODEL, messages=given, stop=list(stop), max_tokens=max_tokens)
    return answer.choices[0].message.content or ""


@functools.cache
def _client() -> AsyncOpenAI:
    import openai

    # The gateway repeats what can be repeated; the limits of the run end an episode.
    return openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", max_retries=0, timeout=None)
