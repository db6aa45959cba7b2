"""Input items of OpenAI's Responses API as chat messages."""

from __future__ import annotations

from collections.abc import Iterator

from mcore_rl.rollout.gateway.dialects import requests
from mcore_rl.rollout.gateway.dialects.fields import Fields
from mcore_rl.rollout.gateway.exchange import RefusedError
from mcore_rl.types.json import JsonObject, JsonValue

_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}
_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_OUTPUT_PARTS = {"input_text": "text", "output_text": "text", "text": "text"}
_IMAGES = ("input_image",)
_ORDER = {"reasoning": 0, "message": 1, "function_call": 2}
"""Order of the items of one turn of the model."""


def input_messages(fields: Fields) -> list[JsonObject]:
    """Return the messages of `input`, a text or a list of items.

    A turn of the model is sent back as several items: reasoning, message and calls become one message. A streamed turn
    may have several reasonings and messages, whose ids name its reply: their texts are joined.

    Raises: RefusedError.
    """
    given = fields.get("input")
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[JsonObject] = []
    place = len(_ORDER)
    """Place in _ORDER of the last item of an open turn; len(_ORDER) if no turn is open."""
    reply = ""
    """Reply that the ids of the open turn's items name."""
    for item in fields.objects("input"):
        kind = _kind(item)
        if kind not in _ORDER:
            messages.append(_other_message(item, kind))
            place, reply = len(_ORDER), ""
            continue
        name = str(item.get("id")).partition("_")[2]
        is_known = reply != "" and (name == reply or name.startswith(f"{reply}_"))
        if not is_known and not _continues(_ORDER[kind], place):
            messages.append({"role": "assistant"})
            reply = ""
        place, reply = _ORDER[kind], reply or name
        _add_to_turn(messages[-1], item, kind)
    return [message for message in messages if len(message) > 1]  # a reasoning item may be encrypted or empty


def _continues(new: int, last: int) -> bool:
    """Return True if an item belongs to the turn of the last item; a turn has several calls, but one message."""
    return last < len(_ORDER) and (new > last or new == last == _ORDER["function_call"])


def _kind(item: Fields) -> str:
    """Return the type of an item; "input" stands for messages of others than the model."""
    kind = item.text("type", "message")
    if kind == "message" and _role(item) != "assistant":
        return "input"
    return kind


def _role(item: Fields) -> str:
    role = item.text("role")
    if role not in _ROLES:
        raise RefusedError(400, f"{item.path}.role is {role[:40]!r}; roles are: {', '.join(_ROLES)}")
    return _ROLES[role]


def _other_message(item: Fields, kind: str) -> JsonObject:
    if kind == "input":
        role = _role(item)
        images = _IMAGES if role == "user" else ()
        return {"role": role, "content": requests.text_parts(item, "content", _PARTS, images=images)}
    if kind == "function_call_output":
        content = requests.text_parts(item, "output", _OUTPUT_PARTS, images=_IMAGES)
        return {"role": "tool", "tool_call_id": item.text("call_id"), "content": "" if content is None else content}
    raise RefusedError(
        400, f"{item.path} is of type {kind[:40]!r}; only messages, calls of functions and reasoning are supported"
    )


def _add_to_turn(message: JsonObject, item: Fields, kind: str) -> None:
    if kind == "message":
        text = requests.joined(requests.text_parts(item, "content", _PARTS))
        message["content"] = f"{message.get('content', '')}{text}"
    elif kind == "reasoning":
        text = "".join(_reasoning(item, "content")) or "\n".join(_reasoning(item, "summary"))
        if text:
            message["reasoning_content"] = f"{message.get('reasoning_content', '')}{text}"
    else:
        function: JsonObject = {"name": item.text("name"), "arguments": item.text("arguments")}
        call: JsonObject = {"id": item.text("call_id"), "type": "function", "function": function}
        calls = message.setdefault("tool_calls", [])
        assert isinstance(calls, list)
        calls.append(call)


def _reasoning(item: Fields, name: str) -> Iterator[str]:
    for part in item.objects(name):
        yield part.text("text")


def function_tools(fields: Fields) -> list[JsonValue]:
    """Return the tools of a request as they were sent. Raises: RefusedError for tools that the vendor's servers run."""
    for tool in fields.objects("tools"):
        if (kind := tool.text("type")) != "function":
            raise RefusedError(400, f"{tool.path} is of type {kind[:40]!r}; only functions are supported")
    tools = fields.get("tools")
    return tools if isinstance(tools, list) else []
