"""Parts of replies that several dialects have: calls, log-probabilities, usage, and errors of OpenAI."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from mcore_rl.data.chat.messages import call_id
from mcore_rl.rollout.gateway.exchange import ChatReply, Choice, RefusedError
from mcore_rl.rollout.gateway.progress import TokenLogp
from mcore_rl.types.json import JsonObject

LOWEST_LOGP = -9999.0
"""Log-probability in place of minus infinity, which is not JSON; OpenAI uses the same number."""


def calls(choice: Choice) -> Iterator[tuple[str, str, str]]:
    """Yield id, name, and arguments as JSON text of the calls of a choice."""
    for number, call in enumerate(choice.calls):
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        yield call.get("id") or call_id(number), call["function"]["name"], arguments


def tokens_of(choice: Choice) -> list[TokenLogp]:
    """Return the sampled tokens of a choice whose log-probabilities are requested."""
    return list(zip(choice.pieces, choice.logp, strict=True))


def token_logps(tokens: Sequence[TokenLogp]) -> list[JsonObject]:
    """Return log-probabilities of sampled tokens, in nats, in the form of OpenAI's interfaces.

    A token with a part of a character has the replacement character as text, so its bytes are unknown: [].
    """
    return [
        {
            "token": text,
            "bytes": [] if "\ufffd" in text else list(text.encode()),
            "logprob": max(logp, LOWEST_LOGP),
            "top_logprobs": [],
        }
        for text, logp in tokens
    ]


def num_sampled(reply: ChatReply) -> int:
    """Return the number of sampled tokens of all choices."""
    return sum(len(choice.token_ids) for choice in reply.choices)


def openai_usage(reply: ChatReply) -> JsonObject:
    """Return the token counts of a reply in the form of OpenAI's chat interface."""
    prompt, sampled = reply.num_prompt_tokens, num_sampled(reply)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def openai_error(error: RefusedError) -> JsonObject:
    """Return an error as the body of OpenAI's interfaces."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}
