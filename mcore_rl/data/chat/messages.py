"""Normalization of chat messages: content as text or text parts, tool calls in OpenAI's format, no null fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from mcore_rl.data.json_text import parse_json, without_nulls
from mcore_rl.errors import DataError
from mcore_rl.types.chat import ChatCall, ChatMessage, TextPart

_TEXT_PARTS = ("text", "input_text", "output_text")
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Field names for the reasoning of an assistant message in data sets and templates."""
_MAX_JSON_LAYERS = 2
"""Limit of JSON decoding of arguments; some exporters encode them twice."""


def chat_messages(prompt: object, where: str, *, struct_nulls: bool = False) -> list[ChatMessage]:
    """Normalize a string (one user message) or a list of chat messages.

    The content is a string, or a list of two or more `{"type": "text", "text": ...}` parts. A tool call is
    `{"type": "function", "function": {"name": str, "arguments": dict}}` with an `id` if the row has one. With
    `struct_nulls` (Arrow files, whose structs have the fields of all rows) nulls are removed at every depth; otherwise
    a null in the arguments of a call is a value.

    Raises: DataError for an empty prompt or any other form; `where` starts the message.
    """
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list):
        raise DataError(f"{where}: the prompt is {type(prompt).__name__}, not a string or a list of chat messages")
    messages = normalized(prompt, where, struct_nulls=struct_nulls)
    if not any(text_of(message).strip() or message.get("tool_calls") for message in messages):
        raise DataError(f"{where}: the prompt is empty")
    return messages


def normalized(messages: Sequence[object], where: str, *, struct_nulls: bool = False) -> list[ChatMessage]:
    """Normalize a list of messages like chat_messages; all of them may be empty.

    Raises: DataError.
    """
    return [_message(each, f"{where}: message {number}", struct_nulls) for number, each in enumerate(messages, start=1)]


def with_answer(messages: Sequence[ChatMessage], answer: ChatMessage) -> list[ChatMessage]:
    """Append the assistant's `answer`, or join it to a last assistant message that begins the answer."""
    if messages and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
        *messages, begun = messages
        answer = {**begun, **answer, "content": text_of(begun) + text_of(answer)}
    return [*messages, answer]


def text_of(message: ChatMessage, separator: str = "\n") -> str:
    """Return the content of a normalized message as one string."""
    content = message["content"]
    return content if isinstance(content, str) else separator.join(part["text"] for part in content)


def _message(message: object, where: str, struct_nulls: bool) -> ChatMessage:
    if not isinstance(message, dict):
        raise DataError(f"{where} is of type {type(message).__name__}: a chat message needs `role` and `content`")
    role = message.get("role")
    if not isinstance(role, str) or not role.strip():
        found = "no `role`" if not role or isinstance(role, str) else f"a role of type {type(role).__name__}"
        raise DataError(f"{where} has {found}: a chat message needs `role` and `content`")
    where = f"{where} ({role})"
    made = {key: without_nulls(value) if struct_nulls else value for key, value in message.items() if value is not None}
    if role == "function":
        made["role"] = "tool"  # OpenAI's former role for the answer to a `function_call`
    _check_reasoning(made, where)
    calls = _tool_calls(made, where)
    if calls and role != "assistant":
        raise DataError(f"{where} has tool calls, but only messages with the role 'assistant' may have them")
    made.pop("function_call", None)
    if calls:
        made["tool_calls"] = calls
    else:
        made.pop("tool_calls", None)
    made["content"] = _content(made.get("content"), where, optional=bool(calls) or "reasoning_content" in made)
    return cast(ChatMessage, made)


def _check_reasoning(message: Mapping[str, object], where: str) -> None:
    for name in REASONING_FIELDS:
        if name in message and not isinstance(message[name], str):
            raise DataError(f"{where}: {name} is of type {type(message[name]).__name__}, not a string")


def _content(content: object, where: str, *, optional: bool) -> str | list[TextPart]:
    if isinstance(content, str):
        return content
    if content is None and optional:
        return ""
    if not isinstance(content, list):
        found = "no `content`" if content is None else f"content of type {type(content).__name__}"
        raise DataError(f"{where} has {found}; a chat message needs `role` and `content`, a string or text parts")
    texts = [_part(part, where) for part in content]
    if len(texts) < 2:
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def _part(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if isinstance(part, dict) and kind in (None, *_TEXT_PARTS) and isinstance(part.get("text"), str):
        return str(part["text"])
    raise DataError(f"{where} has a part of type {kind!r}, but prompts are text only; remove such rows")


def _tool_calls(message: Mapping[str, object], where: str) -> list[ChatCall]:
    calls, single = (_parsed(message.get(name), f"{where}: {name}") for name in ("tool_calls", "function_call"))
    if single:  # OpenAI's former format of a single call
        if calls:
            raise DataError(f"{where} has both tool_calls and function_call; remove function_call")
        calls = [single]
    if not calls:
        return []
    if not isinstance(calls, list):
        raise DataError(f"{where}: tool_calls is {type(calls).__name__}, not a list of calls")
    return [_tool_call(call, f"{where}: tool call {number}") for number, call in enumerate(calls, start=1)]


def _parsed(value: object, where: str) -> object:
    """Decode JSON text; return other values and blank texts unchanged."""
    return parse_json(value, where) if isinstance(value, str) and value.strip() else value


def _tool_call(call: object, where: str) -> ChatCall:
    call = call if isinstance(call, dict) else {}
    function = call.get("function") or call
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise DataError(f"{where} has no `function` with `name` and `arguments`")
    if call.get("type") not in (None, "function"):
        raise DataError(f"{where} is of type {call['type']!r}; only calls of type 'function' are supported")
    given = function.get("arguments", function.get("parameters"))
    arguments = _arguments(given, f"{where}: arguments of {name}")
    made: ChatCall = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": str(call["id"]), **made} if call.get("id") else made


def _arguments(given: object, where: str) -> Mapping[str, object]:
    for _ in range(_MAX_JSON_LAYERS):
        if isinstance(given, str) and given.strip():
            given = parse_json(given, where)
    if given is None or given == "":
        return {}
    if isinstance(given, list) and given and all(map(_is_pair, given)):
        given = dict(given)  # map type of Arrow: a list of pairs
    if not isinstance(given, dict):
        raise DataError(f"{where} are {type(given).__name__}, not an object or its JSON text")
    return given


def _is_pair(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and isinstance(value[0], str)
