"""Parts of replies that several dialects have: texts cut into deltas, calls, usage, and errors of OpenAI."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from mcore_rl.data.chat.messages import call_id
from mcore_rl.rollout.gateway.exchange import ChatReply, Choice, RefusedError
from mcore_rl.types.json import JsonObject

MAX_DELTAS = 64
"""Maximum number of deltas per text. The whole text is known, so more of them would cost both sides time and nothing
else: a client needs about 50 microseconds for an event."""
LOWEST_LOGP = -9999.0
"""Log-probability in place of minus infinity, which is not JSON; OpenAI uses the same number."""


@dataclass(frozen=True)
class Delta:
    """Part of a text. `end`: number of sampled tokens up to the end of the part, 0 if it is unknown."""

    text: str
    end: int


def deltas(choice: Choice) -> tuple[list[Delta], list[Delta]]:
    """Cut reasoning and content at the ends of tokens if the texts of the tokens are known, else at the ends of words.

    The parts of a text concatenate to the text. The texts of tokens contain more than reasoning and content, such as
    special tokens, and a text that they do not contain (a call was removed from it) is cut at words.
    """
    joined = "".join(choice.pieces)
    ends = list(accumulate(map(len, choice.pieces)))
    start = joined.find(choice.reasoning) if choice.reasoning else -1
    reasoning = _cut(choice.reasoning, start, ends)
    content = _cut(choice.content, joined.find(choice.content, max(0, start + len(choice.reasoning))), ends)
    return reasoning, content


def _cut(text: str, start: int, ends: Sequence[int]) -> list[Delta]:
    if not text:
        return []
    if start < 0 or not ends:
        cuts = [(match.end(), 0) for match in re.finditer(r"\s*\S+|\s+$", text)]
    else:
        first, last = bisect_left(ends, start + 1), bisect_left(ends, start + len(text))
        # The last token may end after the text.
        cuts = [(ends[token] - start, token + 1) for token in range(first, last + 1)]
    step = -(-len(cuts) // MAX_DELTAS)
    chosen = [(0, 0), *cuts[step - 1 : -1 : step], cuts[-1]]
    return [Delta(text[begin:end], tokens) for (begin, _), (end, tokens) in pairwise(chosen) if end > begin]


def calls(choice: Choice) -> Iterator[tuple[str, str, str]]:
    """Yield id, name, and arguments as JSON text of the calls of a choice."""
    for number, call in enumerate(choice.calls):
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        yield call.get("id") or call_id(number), call["function"]["name"], arguments


def token_logps(choice: Choice, start: int, end: int) -> list[JsonObject]:
    """Return log-probabilities of sampled tokens, in nats, in the form of OpenAI's interfaces.

    A token with a part of a character has the replacement character as text, so its bytes are unknown: [].
    """
    tokens = zip(choice.pieces[start:end], choice.logp[start:end], strict=True)
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
