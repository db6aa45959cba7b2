"""OpenAI's client for the sessions of a process."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openai import AsyncOpenAI


@dataclass(frozen=True)
class Endpoint:
    """Address of a session for OpenAI's clients, and its key."""

    url: str
    key: str


def client(endpoint: Endpoint) -> AsyncOpenAI:
    """Return a client of a session. All sessions of a process share its connections."""
    return _client().with_options(base_url=endpoint.url, api_key=endpoint.key)


@functools.cache
def _client() -> AsyncOpenAI:
    import openai

    # The gateway repeats what can be repeated; the limits of the run end an episode.
    return openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", max_retries=0, timeout=None)
