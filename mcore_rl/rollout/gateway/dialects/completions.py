"""OpenAI's former interface, which continues a text or token ids without a chat template: /v1/completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from mcore_rl.rollout.gateway.dialects import chat_completions, replies, requests
from mcore_rl.rollout.gateway.dialects.fields import Fields, FieldTable, Refused
from mcore_rl.rollout.gateway.dialects.interface import Call, Dialect, Earlier, Event, ReplyEvents
from mcore_rl.rollout.gateway.exchange import ChatReply, ChatRequest, Choice, RefusedError
from mcore_rl.rollout.gateway.formats.requests import requested_schema
from mcore_rl.rollout.gateway.progress import ReplyStart, TextDelta, TokenLogp
from mcore_rl.types.json import JsonObject, JsonValue

FIELDS = FieldTable(
    read=requests.COMMON_FIELDS
    | set("prompt n stop max_tokens logprobs stream stream_options best_of response_format".split()),
    # `seed`: every sample has a seed of the run, so that the run can be repeated.
    ignored=frozenset("model seed user".split()),
    refused={
        **requests.REFUSED_SAMPLING,
        "echo": Refused((False,), "the prompt has no log-probabilities here"),
        "suffix": Refused(("",), "texts can be continued, not completed in the middle"),
        "prompt_embeds": Refused(),
    },
)


@dataclass(frozen=True)
class CompletionsCall(Call):
    """Request of /v1/completions. `include_usage`: the events end with the token counts."""

    include_usage: bool = False

    def body(self, reply: ChatReply) -> JsonObject:
        choices: list[JsonValue] = []
        for number, choice in enumerate(reply.choices):
            logps = None if self.request.top_logprobs is None else _logps(replies.tokens_of(choice), 0)
            choices.append(_choice(number, choice.content, logps, _reason(choice)))
        return {**self.head(reply), "choices": choices, "usage": replies.openai_usage(reply)}

    def events(self) -> ReplyEvents:
        return CompletionEvents(self)

    def head(self, reply: ChatReply | ReplyStart) -> JsonObject:
        """Return the fields that replies and events have."""
        return {"id": reply.id, "object": "text_completion", "created": reply.created, "model": self.model}


class CompletionEvents(ReplyEvents):
    """Reply as events."""

    def __init__(self, call: CompletionsCall) -> None:
        super().__init__()
        self._call = call
        self._head: JsonObject = {}
        self._offsets: dict[int, int] = {}
        """Number of characters of the tokens that were sent, by choice."""

    def error(self, error: RefusedError) -> Event:
        return Event(replies.openai_error(error))

    def _begin(self, start: ReplyStart) -> Iterator[Event]:
        self._head = self._call.head(start)
        return iter(())

    def _text(self, delta: TextDelta) -> Iterator[Event]:
        yield self._event(delta.number, delta.text, delta.tokens, None)

    def _end_choice(self, number: int, choice: Choice, tokens: Sequence[TokenLogp]) -> Iterator[Event]:
        yield self._event(number, "", tokens, _reason(choice))

    def _end(self, reply: ChatReply) -> Iterator[Event]:
        if self._call.include_usage:
            yield Event({**self._head, "choices": [], "usage": replies.openai_usage(reply)})
        yield Event("[DONE]")

    def _event(self, number: int, text: str, tokens: Sequence[TokenLogp], reason: str | None) -> Event:
        offset = self._offsets.get(number, 0)
        self._offsets[number] = offset + sum(len(piece) for piece, _ in tokens)
        logps = _logps(tokens, offset) if tokens else None
        return Event({**self._head, "choices": [_choice(number, text, logps, reason)]})


def _choice(number: int, text: str, logps: JsonObject | None, reason: str | None) -> JsonObject:
    return {"index": number, "text": text, "logprobs": logps, "finish_reason": reason}


def _logps(tokens: Sequence[TokenLogp], offset: int) -> JsonObject:
    """Return log-probabilities of tokens. `offset`: number of characters of the tokens before them."""
    return {
        "tokens": [text for text, _ in tokens],
        "token_logprobs": [max(logp, replies.LOWEST_LOGP) for _, logp in tokens],
        "top_logprobs": None,
        "text_offset": list(accumulate((len(text) for text, _ in tokens), initial=offset))[:-1],
    }


def _reason(choice: Choice) -> str:
    return "length" if choice.finish_reason == "length" else "stop"


def read(body: Mapping[str, JsonValue], model: str, earlier: Earlier) -> CompletionsCall:
    """Read a request. Raises: RefusedError."""
    FIELDS.check(body)
    fields = Fields(body)
    num_choices = fields.integer("n", 1, requests.MAX_CHOICES) or 1
    if fields.integer("best_of", 1, requests.MAX_CHOICES) not in {None, num_choices}:
        raise RefusedError(400, "best_of must be equal to n; every sample is returned")
    if fields.integer("logprobs", 0, 20):
        raise RefusedError(400, "logprobs: only sampled tokens have log-probabilities here; set it to 0")
    request = ChatRequest(
        prompt=_prompt(fields),
        sampling=requests.sampling(fields, limits=("max_tokens",), stop="stop"),
        num_choices=num_choices,
        top_logprobs=None if fields.get("logprobs") is None else 0,
        role=requests.role(fields),
        stream=fields.flag("stream", False),
        schema=requested_schema(fields.mapping("response_format"), nested=True, has_tools=False),
    )
    options = fields.mapping("stream_options")
    usage = options is not None and options.flag("include_usage", False)
    return CompletionsCall(model, request, usage)


def _prompt(fields: Fields) -> str | Sequence[int]:
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt:
        ids = [each for each in prompt if isinstance(each, int) and not isinstance(each, bool) and each >= 0]
        if len(ids) == len(prompt):
            return ids
        raise RefusedError(400, "prompt must be one text or one list of token ids; send each prompt as a request")
    raise fields.wrong("prompt", "a text or a list of token ids, not empty")


DIALECT = Dialect("/v1/completions", read, replies.openai_error, chat_completions.DIALECT.ping)
