"""Normalization of chat messages: content as text or text parts, tool calls in OpenAI's format with ids, no nulls.

Every call gets an id, which the tool message that answers it repeats.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import cast

from mcore_rl.data.json_text import parse_json, without_nulls
from mcore_rl.errors import DataError
from mcore_rl.types.chat import ChatCall, ChatMessage, ContentPart, TextPart

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
    if isinstance(content, str):
        return content
    return separator.join(part["text"] for part in content if "text" in part)


def message_images(message: ChatMessage) -> list[bytes]:
    """Return the images in a message: the answer of a tool, or a message of a program behind the gateway."""
    content = message["content"]
    return [] if isinstance(content, str) else [part["image"] for part in content if "image" in part]


def answer_content(text: str, images: Sequence[bytes]) -> str | list[ContentPart]:
    """Return the content of a tool's answer: the images, then the text."""
    if not images:
        return text
    parts: list[ContentPart] = [{"type": "image", "image": image} for image in images]
    return [*parts, {"type": "text", "text": text}] if text else parts


def with_texts(message: ChatMessage, changed: Callable[[str], str]) -> ChatMessage:
    """Return a copy with another content: `changed` replaces its texts."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": changed(content)}
    parts: list[ContentPart] = [
        {"type": "text", "text": changed(part["text"])} if "text" in part else part for part in content
    ]
    return {**message, "content": parts}


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
    # A turn with only calls or only reasoning may lack a content.
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
        given = _parsed(given, where)
    if given is None or given == "":
        return {}
    if isinstance(given, list) and given and all(map(_is_pair, given)):
        given = dict(given)  # map type of Arrow: a list of pairs
    if not isinstance(given, dict):
        raise DataError(f"{where} are {type(given).__name__}, not an object or its JSON text")
    return given


def _is_pair(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and isinstance(value[0], str)


NewId = Callable[[str, str, int], str]
"""Function from (id of a call, name of the tool, number of the call in the conversation) to a new id."""


def call_id(number: int) -> str:
    """Return the id of a call without id: nine letters and digits, which some templates require."""
    return f"call{number:05d}"


def chat_call(name: str, arguments: Mapping[str, object], given_id: str) -> ChatCall:
    """Return a call as part of a message."""
    return {"id": given_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def same_id(given: str, name: str, number: int) -> str:
    """Keep the id of a call."""
    return given


def with_call_ids(
    messages: Sequence[ChatMessage], where: str, *, strict: bool, new_id: NewId = same_id
) -> list[ChatMessage]:
    """Add missing ids, then replace all ids of calls and of the tool messages that answer them by `new_id`.

    A tool message without id answers the first open call with its `name`, else the first open call. Unless `strict`, a
    tool message may have the id of no call.

    Raises: DataError for a tool message that answers no call of the preceding turn.
    """
    completed: list[ChatMessage] = []
    # Open calls of the latest assistant turn that has any; None before the first such turn.
    calls: list[ChatCall] | None = None
    new_ids: dict[str, str] = {}
    number = 0
    for place, message in enumerate(messages):
        made = message.copy()
        if given := message.get("tool_calls"):
            calls = _with_ids(given, _given_ids(messages[place + 1 :]), number)
            # Conversations may reuse an id: a tool message refers to the latest call with it.
            for index, call in enumerate(calls, start=number):
                new_ids[call["id"]] = new_id(call["id"], call["function"]["name"], index)
            number += len(calls)
            made["tool_calls"] = [{**call, "id": new_ids[call["id"]]} for call in calls]
        elif made["role"] == "tool" and calls is not None:
            call_of_answer = _answered_call(made, calls)
            if call_of_answer is not None:
                # Each call is answered once; further messages answer the remaining calls.
                calls.remove(call_of_answer)
                made["tool_call_id"] = call_of_answer["id"]
            elif strict:
                ids = ", ".join(str(each["id"]) for each in calls) or "none"
                raise DataError(
                    f"{where}: message {place + 1} answers tool call {made.get('tool_call_id')!r}, but the open calls "
                    f"before it are: {ids}"
                )
        # A row may hold an id that is no text.
        if (answered := str(made.get("tool_call_id", ""))) in new_ids:
            made["tool_call_id"] = new_ids[answered]
        completed.append(made)
    return completed


def kimi_id(given: str, name: str, number: int) -> str:
    """Return an id in the format of Kimi-K2, whose template takes the tool's name from the id."""
    return given if re.fullmatch(rf"(functions\.)?{re.escape(name)}:\d+", given) else f"functions.{name}:{number}"


def nine_characters(given: str, name: str, number: int) -> str:
    """Return an id in the format of Mistral's templates."""
    return given if re.fullmatch(r"[a-zA-Z0-9]{9}", given) else call_id(number)


def _given_ids(after: Sequence[ChatMessage]) -> list[str]:
    """Return the ids of the immediately following tool messages."""
    answers = takewhile(lambda message: message["role"] == "tool", after)
    return [answer["tool_call_id"] for answer in answers if answer.get("tool_call_id")]


def _with_ids(calls: Sequence[ChatCall], answered: Sequence[str], number: int) -> list[ChatCall]:
    """Add ids to calls without one: unused ids of the answers in their order, then new ids."""
    own = {call.get("id") for call in calls}
    # A row may have ids in the answers only.
    free = iter([each for each in answered if each not in own])
    return [{**call, "id": call.get("id") or next(free, call_id(number + place))} for place, call in enumerate(calls)]


def _answered_call(message: ChatMessage, calls: Sequence[ChatCall]) -> ChatCall | None:
    given, name = message.get("tool_call_id"), message.get("name")
    if given is not None:
        return next((call for call in calls if call["id"] == given), None)
    return next((call for call in calls if call["function"]["name"] == name), calls[0] if calls else None)
