"""OpenAI's Responses API: /v1/responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mcore_rl.rollout.gateway.dialects import replies, requests
from mcore_rl.rollout.gateway.dialects.fields import Fields, FieldTable, Refused
from mcore_rl.rollout.gateway.dialects.interface import Call, Dialect, Earlier, ReplyEvents
from mcore_rl.rollout.gateway.dialects.responses_events import ResponseEvents
from mcore_rl.rollout.gateway.dialects.responses_input import function_tools, input_messages
from mcore_rl.rollout.gateway.exchange import ChatReply, ChatRequest, Choice, RefusedError, answer_message
from mcore_rl.rollout.gateway.formats.requests import requested_schema
from mcore_rl.rollout.gateway.progress import ReplyStart, TokenLogp
from mcore_rl.types.chat import ChatMessage
from mcore_rl.types.json import JsonObject, JsonValue

LOGPS = "message.output_text.logprobs"
"""Value of `include` that asks for log-probabilities."""

FIELDS = FieldTable(
    read=requests.COMMON_FIELDS
    | set("input instructions tools tool_choice max_output_tokens top_logprobs include stream store".split())
    | {"previous_response_id", "text"},
    # `reasoning` and `text.verbosity` are for OpenAI's models, `max_tool_calls` limits tools that its servers run. The
    # others concern accounts and caches.
    ignored=frozenset(
        """model user reasoning max_tool_calls stream_options service_tier safety_identifier prompt_cache_key
        prompt_cache_options prompt_cache_retention access_programs background_options image
        parallel_tool_calls""".split()
    ),
    refused={
        **requests.REFUSED_SAMPLING,
        "truncation": Refused(("disabled",), "set it to disabled: messages are never removed"),
        "background": Refused((False,), "a reply is sent on the connection of its request"),
        "conversation": Refused((), "send previous_response_id or the whole input"),
        "context_management": Refused(([],), "shorten the input yourself"),
        "n": Refused((1,)),
        "stop": Refused(([],)),
        "prompt": Refused((), "send its text as `instructions` or `input`"),
        "moderation": Refused(),
    },
)


@dataclass(frozen=True)
class ResponsesCall(Call):
    """Request of /v1/responses.

    settings: fields of the request that its reply repeats.
    history: messages of the conversation without `instructions`, which are for one request only.
    store: True if later requests may continue the reply.
    """

    settings: Mapping[str, JsonValue] = field(default_factory=dict)
    history: Sequence[ChatMessage] = ()
    store: bool = True

    def body(self, reply: ChatReply) -> JsonObject:
        choice = reply.choices[0]
        cut = choice.finish_reason == "length"
        sampled = replies.num_sampled(reply)
        return {
            **self.head(reply),
            "status": self.status(choice),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": list(self._output(reply.id, choice)),
            "usage": {
                "input_tokens": reply.num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": sampled,
                # Not counted: the tokens of the reasoning are not marked.
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": reply.num_prompt_tokens + sampled,
            },
        }

    def events(self) -> ReplyEvents:
        return ResponseEvents(self)

    def conversation(self, reply: ChatReply) -> Sequence[ChatMessage]:
        return [*self.history, answer_message(reply.choices[0])] if self.store else ()

    def head(self, reply: ChatReply | ReplyStart) -> JsonObject:
        """Return the fields that a response has from its beginning."""
        return {
            "id": reply.id,
            "object": "response",
            "created_at": reply.created,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "truncation": "disabled",
            "parallel_tool_calls": True,
            "background": False,
            "store": self.store,
            **self.settings,
        }

    def status(self, choice: Choice) -> str:
        """Return the status of a response, and of its last item."""
        return "incomplete" if choice.finish_reason == "length" else "completed"

    def text_part(self, text: str, tokens: Sequence[TokenLogp]) -> JsonObject:
        """Return the part of a message with its text."""
        logps: list[JsonValue] = list(replies.token_logps(tokens))
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logps}

    def message_item(self, name: str) -> JsonObject:
        """Return a message without content and status."""
        return {"type": "message", "id": f"msg_{name}", "role": "assistant"}

    def reasoning_item(self, name: str) -> JsonObject:
        """Return a reasoning without content and status."""
        return {"type": "reasoning", "id": f"rs_{name}", "summary": []}

    def call_items(self, reply_id: str, choice: Choice) -> Iterator[JsonObject]:
        """Yield the items of the calls."""
        for number, (call_id, name, arguments) in enumerate(replies.calls(choice)):
            yield {
                "type": "function_call",
                "id": f"fc_{reply_id}_{number}",
                "call_id": call_id,
                "name": name,
                "arguments": arguments,
                "status": "completed",  # only complete calls can be read
            }

    def _output(self, reply_id: str, choice: Choice) -> Iterator[JsonObject]:
        if choice.reasoning:
            text: JsonObject = {"type": "reasoning_text", "text": choice.reasoning}
            status = "completed" if choice.content or choice.calls else self.status(choice)
            yield {**self.reasoning_item(reply_id), "content": [text], "status": status}
        # A turn with calls only has no message; an empty turn has an empty message.
        if choice.content or not choice.calls:
            tokens = replies.tokens_of(choice) if self.request.top_logprobs is not None else []
            part, status = self.text_part(choice.content, tokens), "completed" if choice.calls else self.status(choice)
            yield {**self.message_item(reply_id), "content": [part], "status": status}
        yield from self.call_items(reply_id, choice)


def read(body: Mapping[str, JsonValue], model: str, earlier: Earlier) -> ResponsesCall:
    """Read a request. Raises: RefusedError."""
    FIELDS.check(body)
    fields = Fields(body)
    if fields.get("input") is None:
        raise fields.wrong("input", "a text or a list of items")
    tools, choice = function_tools(fields), fields.get("tool_choice")
    requests.check_tool_choice(choice, "tool_choice", accepted=("auto", "none"))
    schemas = [requests.tool_schema(each, "parameters") for each in fields.objects("tools")]
    history = [*_earlier(fields, earlier), *requests.messages_of(input_messages(fields), "input")]
    instructions = fields.text("instructions", "")
    system: list[ChatMessage] = [{"role": "system", "content": instructions}] if instructions else []
    offered = [] if choice == "none" else None if fields.get("tools") is None else schemas
    text = fields.mapping("text")
    form = None if text is None else text.mapping("format")
    request = ChatRequest(
        messages=[*system, *history],
        tools=offered,
        sampling=requests.sampling(fields, limits=("max_output_tokens",), stop=None),
        top_logprobs=0 if _wants_logps(fields) else None,
        role=requests.role(fields),
        stream=fields.flag("stream", False),
        schema=requested_schema(form, nested=False, has_tools=bool(offered)),
    )
    settings: dict[str, JsonValue] = {
        "text": {"format": {"type": "text"} if text is None or form is None else text.get("format")},
        "tools": tools,
        "tool_choice": choice or "auto",
        **{name: fields.get(name) for name in _REPEATED},
    }
    return ResponsesCall(model, request, settings=settings, history=history, store=fields.flag("store", True))


_REPEATED = "instructions max_output_tokens previous_response_id temperature top_p metadata reasoning".split()


def _earlier(fields: Fields, earlier: Earlier) -> Sequence[ChatMessage]:
    previous = fields.text("previous_response_id", "")
    if not previous:
        return ()
    if (found := earlier(previous)) is None:
        text = f"previous_response_id {previous[:80]!r} is not kept any more or unknown; send the whole input"
        raise RefusedError(400, text, "previous_response_not_found")
    return found


def _wants_logps(fields: Fields) -> bool:
    if fields.integer("top_logprobs", 0, 20):
        raise RefusedError(400, "top_logprobs: only sampled tokens have log-probabilities here; set it to 0")
    return LOGPS in (fields.texts("include") or ())


DIALECT = Dialect(
    "/v1/responses",
    read,
    replies.openai_error,
    ping=b": ping\n\n",
    count_path="/v1/responses/input_tokens",
    counted=lambda tokens: {"object": "response.input_tokens", "input_tokens": tokens},
)
