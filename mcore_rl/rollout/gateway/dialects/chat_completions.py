"""OpenAI's chat interface: /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mcore_rl.data.chat.messages import REASONING_FIELDS
from mcore_rl.rollout.gateway.dialects import replies, requests
from mcore_rl.rollout.gateway.dialects.fields import Fields, FieldTable, Refused
from mcore_rl.rollout.gateway.dialects.interface import Call, Dialect, Earlier, Event, ReplyEvents
from mcore_rl.rollout.gateway.exchange import ChatReply, ChatRequest, Choice, RefusedError
from mcore_rl.rollout.gateway.formats.requests import requested_schema
from mcore_rl.rollout.gateway.progress import ReplyStart, TextDelta, TokenLogp
from mcore_rl.types.chat import ToolSchema
from mcore_rl.types.json import JsonObject, JsonValue

FIELDS = FieldTable(
    read=requests.COMMON_FIELDS
    | set("messages tools tool_choice n stop max_tokens max_completion_tokens".split())
    | set("logprobs top_logprobs stream stream_options response_format".split()),
    # `seed`: every sample has a seed of the run, so that the run can be repeated. `reasoning_effort`, `verbosity` and
    # `prediction` are for OpenAI's models. The others concern accounts, storage and caches.
    ignored=frozenset(
        """model seed user store service_tier safety_identifier prompt_cache_key prompt_cache_options
        prompt_cache_retention reasoning_effort verbosity prediction parallel_tool_calls""".split()
    ),
    refused={
        **requests.REFUSED_SAMPLING,
        "modalities": Refused((["text"],), "only text can be sampled"),
        "functions": Refused(([],), "send `tools`"),
        "function_call": Refused(("auto", "none"), "send `tools` and `tool_choice`"),
        "chat_template_kwargs": Refused(({},), "set data.template_kwargs of the run"),
        "chat_template": Refused((), "the run's template is used"),
        "add_generation_prompt": Refused((True,)),
        "continue_final_message": Refused((False,)),
        "documents": Refused(([],)),
        "audio": Refused(),
        "moderation": Refused(),
        "web_search_options": Refused((), "send a function that searches as a tool"),
    },
)

_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_MESSAGE_FIELDS = ("name", "tool_calls", "function_call", "tool_call_id", *REASONING_FIELDS)
_PARTS = {"text": "text", "refusal": "refusal"}


@dataclass(frozen=True)
class ChatCompletionsCall(Call):
    """Request of /v1/chat/completions. `include_usage`: the events end with the token counts."""

    include_usage: bool = False

    def body(self, reply: ChatReply) -> JsonObject:
        choices: list[JsonValue] = [self._choice(number, choice) for number, choice in enumerate(reply.choices)]
        return {**self.head(reply, "chat.completion"), "choices": choices, "usage": replies.openai_usage(reply)}

    def events(self) -> ReplyEvents:
        return ChatEvents(self)

    def head(self, reply: ChatReply | ReplyStart, kind: str) -> JsonObject:
        """Return the fields that replies and events have."""
        return {"id": reply.id, "object": kind, "created": reply.created, "model": self.model}

    def _choice(self, number: int, choice: Choice) -> JsonObject:
        message: JsonObject = {"role": "assistant", "content": choice.content, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.calls:
            message["content"] = choice.content or None
            message["tool_calls"] = [_call(*call) for call in replies.calls(choice)]
        logps = None if self.request.top_logprobs is None else _logps(replies.tokens_of(choice))
        return {"index": number, "message": message, "logprobs": logps, "finish_reason": choice.finish_reason}


class ChatEvents(ReplyEvents):
    """Reply as chunks. The tokens of calls and special tokens belong to the chunk that follows them."""

    def __init__(self, call: ChatCompletionsCall) -> None:
        super().__init__()
        self._call = call
        self._head: JsonObject = {}

    def error(self, error: RefusedError) -> Event:
        return Event(replies.openai_error(error))

    def _begin(self, start: ReplyStart) -> Iterator[Event]:
        self._head = self._call.head(start, "chat.completion.chunk")
        for number in range(self._call.request.num_choices):
            yield self._chunk(number, {"role": "assistant", "content": "", "refusal": None})

    def _text(self, delta: TextDelta) -> Iterator[Event]:
        name = "content" if delta.kind == "content" else "reasoning_content"
        yield self._chunk(delta.number, {name: delta.text}, delta.tokens)

    def _end_choice(self, number: int, choice: Choice, tokens: Sequence[TokenLogp]) -> Iterator[Event]:
        for place, (given_id, name, arguments) in enumerate(replies.calls(choice)):
            yield self._chunk(number, {"tool_calls": [{"index": place, **_call(given_id, name, "")}]})
            yield self._chunk(number, {"tool_calls": [{"index": place, "function": {"arguments": arguments}}]})
        yield self._chunk(number, {}, tokens, choice.finish_reason)

    def _end(self, reply: ChatReply) -> Iterator[Event]:
        if self._call.include_usage:
            yield Event({**self._head, "choices": [], "usage": replies.openai_usage(reply)})
        yield Event("[DONE]")

    def _chunk(
        self, number: int, delta: JsonObject, tokens: Sequence[TokenLogp] = (), reason: str | None = None
    ) -> Event:
        logps = _logps(tokens) if tokens else None
        part: JsonObject = {"index": number, "delta": delta, "logprobs": logps, "finish_reason": reason}
        return Event({**self._head, "choices": [part]})


def _logps(tokens: Sequence[TokenLogp]) -> JsonObject:
    return {"content": list(replies.token_logps(tokens)), "refusal": None}


def _call(given_id: str, name: str, arguments: str) -> JsonObject:
    return {"id": given_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def read(body: Mapping[str, JsonValue], model: str, earlier: Earlier) -> ChatCompletionsCall:
    """Read a request. Raises: RefusedError."""
    FIELDS.check(body)
    fields = Fields(body)
    options = fields.mapping("stream_options")
    tools = _tools(fields)
    request = ChatRequest(
        messages=requests.messages_of([_message(each) for each in fields.objects("messages")], "messages"),
        tools=tools,
        sampling=requests.sampling(fields, limits=("max_completion_tokens", "max_tokens"), stop="stop"),
        num_choices=fields.integer("n", 1, requests.MAX_CHOICES) or 1,
        top_logprobs=0 if _wants_logps(fields) else None,
        role=requests.role(fields),
        stream=fields.flag("stream", False),
        schema=requested_schema(fields.mapping("response_format"), nested=True, has_tools=bool(tools)),
    )
    usage = options is not None and options.flag("include_usage", False)
    return ChatCompletionsCall(model, request, usage)


def _message(fields: Fields) -> JsonObject:
    role = fields.text("role")
    if role == "function":
        role = "tool"  # the former role for the answer to a `function_call`
    if role not in _ROLES:
        raise RefusedError(400, f"{fields.path}.role is {role[:40]!r}; roles are: {', '.join(_ROLES)}")
    images = ("image_url",) if role in ("user", "tool") else ()
    content = requests.text_parts(fields, "content", _PARTS, images=images)
    if role == "assistant":
        content = None if content is None else requests.joined(content)
    return {"role": _ROLES[role], "content": content, **{name: fields.get(name) for name in _MESSAGE_FIELDS}}


def _tools(fields: Fields) -> list[ToolSchema] | None:
    tools = [_tool(each) for each in fields.objects("tools")]
    choice = fields.get("tool_choice")
    requests.check_tool_choice(choice, "tool_choice", accepted=("auto", "none"))
    # A model that is shown tools may call them, so `none` hides them.
    return [] if choice == "none" else None if fields.get("tools") is None else tools


def _tool(fields: Fields) -> ToolSchema:
    if fields.text("type", "function") != "function" or (function := fields.mapping("function")) is None:
        raise RefusedError(
            400, f"{fields.path} must be {{type: function, function: {{name, description, parameters}}}}"
        )
    return requests.tool_schema(function, "parameters")


def _wants_logps(fields: Fields) -> bool:
    wanted = fields.flag("logprobs", False)
    if fields.integer("top_logprobs", 0, 20):
        raise RefusedError(400, "top_logprobs: only sampled tokens have log-probabilities here; set it to 0")
    return wanted


DIALECT = Dialect("/v1/chat/completions", read, replies.openai_error, ping=b": ping\n\n")
