"""Anthropic's Messages API: /v1/messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mcore_rl.rollout.gateway.dialects import replies, requests
from mcore_rl.rollout.gateway.dialects.fields import Fields, FieldTable, Refused
from mcore_rl.rollout.gateway.dialects.interface import Call, Dialect, Earlier, Event, ReplyEvents
from mcore_rl.rollout.gateway.dialects.messages_input import input_messages
from mcore_rl.rollout.gateway.exchange import ChatReply, ChatRequest, Choice, RefusedError
from mcore_rl.rollout.gateway.formats.requests import requested_schema
from mcore_rl.rollout.gateway.progress import ReplyStart, TextDelta, TokenLogp
from mcore_rl.rollout.tools.turn_reader import Kind
from mcore_rl.types.chat import ToolSchema
from mcore_rl.types.json import JsonObject, JsonValue

FIELDS = FieldTable(
    read=requests.COMMON_FIELDS
    | set("messages system tools tool_choice max_tokens stop_sequences stream thinking output_config".split()),
    # They concern accounts, servers and caches.
    ignored=frozenset(
        """model service_tier speed inference_geo cache_control diagnostics user_profile_id workspace_id
        betas billing_policy fallback_credit_token""".split()
    ),
    refused={
        **requests.REFUSED_SAMPLING,
        "n": Refused((1,)),
        "container": Refused(),
        "mcp_servers": Refused(([],), "call the tools in the harness"),
        "context_management": Refused(({}, {"edits": []}), "shorten the messages yourself"),
        "compaction": Refused((), "shorten the messages yourself"),
        "thread": Refused((), "send all messages"),
        "output_format": Refused((), "send `output_config.format`"),
        "fallbacks": Refused(([],)),
    },
)

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@dataclass(frozen=True)
class MessagesCall(Call):
    """Request of /v1/messages.

    thinking: True if the reply shows the reasoning. Clients that did not ask for it read the first block as the text.
    """

    thinking: bool = False

    def body(self, reply: ChatReply) -> JsonObject:
        choice = reply.choices[0]
        return {
            **self.head(reply),
            "content": list(self._blocks(choice)),
            **self.ending(choice),
            "usage": {"input_tokens": reply.num_prompt_tokens, "output_tokens": replies.num_sampled(reply)},
        }

    def events(self) -> ReplyEvents:
        return MessageEvents(self)

    def head(self, reply: ChatReply | ReplyStart) -> JsonObject:
        """Return the fields that replies and events have."""
        return {"id": reply.id, "type": "message", "role": "assistant", "model": self.model}

    def _blocks(self, choice: Choice) -> Iterator[JsonObject]:
        if choice.reasoning and self.thinking:
            # Only Anthropic's servers check signatures.
            yield {"type": "thinking", "thinking": choice.reasoning, "signature": ""}
        if choice.content:
            yield {"type": "text", "text": choice.content}
        for call_id, name, arguments in replies.calls(choice):
            yield {"type": "tool_use", "id": call_id, "name": name, "input": json.loads(arguments)}

    def ending(self, choice: Choice) -> JsonObject:
        """Return the fields that name the reason of a reply's end."""
        # The run's own stop strings are no stop sequences of the client.
        stops = self.request.sampling.get("stop")
        if isinstance(stops, tuple) and choice.stop in stops:
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop}
        return {"stop_reason": _REASONS[choice.finish_reason], "stop_sequence": None}


class MessageEvents(ReplyEvents):
    """Reply as events: a message of blocks, each of which starts empty and grows by deltas."""

    def __init__(self, call: MessagesCall) -> None:
        super().__init__()
        self._call = call
        self._open: Kind | None = None
        """Kind of the last block, while it is open."""
        self._num_blocks = 0

    def error(self, error: RefusedError) -> Event:
        return Event(_error(error), "error")

    def _begin(self, start: ReplyStart) -> Iterator[Event]:
        message: JsonObject = {
            **self._call.head(start),
            "content": [],
            **dict.fromkeys(("stop_reason", "stop_sequence")),
            "usage": {"input_tokens": start.num_prompt_tokens, "output_tokens": 0},
        }
        yield _event("message_start", message=message)

    def _text(self, delta: TextDelta) -> Iterator[Event]:
        if delta.kind == "reasoning" and not self._call.thinking:
            return
        if self._open != delta.kind:
            yield from self._close()
            self._open = delta.kind
            thinking = delta.kind == "reasoning"
            yield self._started({"type": "thinking", "thinking": "", "signature": ""} if thinking else _EMPTY_TEXT)
        if delta.kind == "reasoning":
            yield self._grown({"type": "thinking_delta", "thinking": delta.text})
        else:
            yield self._grown({"type": "text_delta", "text": delta.text})

    def _end_choice(self, number: int, choice: Choice, tokens: Sequence[TokenLogp]) -> Iterator[Event]:
        yield from self._close()
        for call_id, name, arguments in replies.calls(choice):
            yield self._started({"type": "tool_use", "id": call_id, "name": name, "input": {}})
            yield self._grown({"type": "input_json_delta", "partial_json": arguments})
            yield self._stopped()

    def _end(self, reply: ChatReply) -> Iterator[Event]:
        delta = self._call.ending(reply.choices[0])
        yield _event("message_delta", delta=delta, usage={"output_tokens": replies.num_sampled(reply)})
        yield _event("message_stop")

    def _close(self) -> Iterator[Event]:
        if self._open == "reasoning":
            yield self._grown({"type": "signature_delta", "signature": ""})
        if self._open is not None:
            yield self._stopped()
        self._open = None

    def _started(self, block: JsonObject) -> Event:
        self._num_blocks += 1
        return _event("content_block_start", index=self._num_blocks - 1, content_block=block)

    def _grown(self, delta: JsonObject) -> Event:
        return _event("content_block_delta", index=self._num_blocks - 1, delta=delta)

    def _stopped(self) -> Event:
        return _event("content_block_stop", index=self._num_blocks - 1)


_EMPTY_TEXT: JsonObject = {"type": "text", "text": ""}


def _event(kind: str, **fields: JsonValue) -> Event:
    return Event({"type": kind, **fields}, kind)


def read(body: Mapping[str, JsonValue], model: str, earlier: Earlier) -> MessagesCall:
    """Read a request. Raises: RefusedError."""
    FIELDS.check(body)
    fields = Fields(body)
    output, tools = fields.mapping("output_config"), _tools(fields)
    form = None if output is None else output.mapping("format")
    request = ChatRequest(
        messages=requests.messages_of(input_messages(fields), "messages"),
        tools=tools,
        sampling=requests.sampling(fields, limits=("max_tokens",), stop="stop_sequences"),
        role=requests.role(fields),
        stream=fields.flag("stream", False),
        schema=requested_schema(form, nested=False, has_tools=bool(tools)),
    )
    thinking = fields.mapping("thinking")
    shows = thinking is not None and thinking.text("type") != "disabled" and thinking.text("display", "") != "omitted"
    return MessagesCall(model, request, thinking=shows)


def _tools(fields: Fields) -> list[ToolSchema] | None:
    choice = fields.mapping("tool_choice")
    kind = "auto" if choice is None else choice.text("type")
    requests.check_tool_choice(kind, "tool_choice.type", accepted=("auto", "none"))
    if choice is not None and choice.flag("disable_parallel_tool_use", False):
        raise RefusedError(400, "`tool_choice.disable_parallel_tool_use` is not supported here; leave it out")
    tools = [_tool(each) for each in fields.objects("tools")]
    # A model that is shown tools may call them, so `none` hides them.
    return [] if kind == "none" else None if fields.get("tools") is None else tools


def _tool(fields: Fields) -> ToolSchema:
    if (kind := fields.text("type", "custom")) != "custom":
        raise RefusedError(
            400, f"{fields.path} is of type {kind[:40]!r}; only tools with an input_schema are supported"
        )
    return requests.tool_schema(fields, "input_schema")


def _error(error: RefusedError) -> JsonObject:
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


PATH = "/v1/messages"
DIALECT = Dialect(PATH, read, _error, ping=_event("ping").encoded(), count_path=f"{PATH}/count_tokens")
