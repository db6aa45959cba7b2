"""Messages of Anthropic's API as chat messages."""

from __future__ import annotations

from collections.abc import Iterator

from mcore_rl.rollout.gateway.dialects import requests
from mcore_rl.rollout.gateway.dialects.fields import Fields
from mcore_rl.rollout.gateway.exchange import RefusedError
from mcore_rl.types.json import JsonObject, JsonValue

_TEXT = {"text": "text"}


def input_messages(fields: Fields) -> list[JsonObject]:
    """Return `system` and `messages` of a request.

    Results of tools are blocks of a user's message; they become messages of their own, before the text that follows.

    Raises: RefusedError.
    """
    messages: list[JsonObject] = []
    if system := requests.text_parts(fields, "system", _TEXT):
        messages.append({"role": "system", "content": system})
    for message in fields.objects("messages"):
        role = message.text("role")
        if role == "assistant":
            messages.append(_assistant(message))
        elif role == "user":
            messages += _user(message)
        elif role == "system":
            messages.append({"role": "system", "content": requests.text_parts(message, "content", _TEXT)})
        else:
            raise RefusedError(400, f"{message.path}.role is {role[:40]!r}; roles are: user, assistant, system")
    return messages


def _blocks(message: Fields) -> Iterator[tuple[str, Fields]]:
    for block in message.objects("content"):
        yield block.text("type"), block


def _unsupported(block: Fields, kind: str) -> RefusedError:
    return RefusedError(
        400, f"{block.path} is of type {kind[:40]!r}; only text, images and tools are supported, remove it"
    )


def _user(message: Fields) -> Iterator[JsonObject]:
    content = message.get("content")
    if isinstance(content, str) or content is None:
        yield {"role": "user", "content": content}
        return
    parts: list[JsonValue] = []
    for kind, block in _blocks(message):
        if kind == "text":
            parts.append({"type": "text", "text": block.text("text")})
        elif kind == requests.IMAGE:
            parts.append(requests.image_part(block, kind))
        elif kind == "tool_result":
            if parts:
                yield {"role": "user", "content": parts}
                parts = []
            yield _tool_result(block)
        else:
            raise _unsupported(block, kind)
    if parts:
        yield {"role": "user", "content": parts}


def _tool_result(block: Fields) -> JsonObject:
    # `is_error` has no place in chat templates; the content describes the error.
    content = requests.text_parts(block, "content", _TEXT, images=(requests.IMAGE,))
    return {"role": "tool", "tool_call_id": block.text("tool_use_id"), "content": "" if content is None else content}


def _assistant(message: Fields) -> JsonObject:
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return {"role": "assistant", "content": content}
    texts, thoughts, calls = [], [], []
    for kind, block in _blocks(message):
        if kind == "text":
            texts.append(block.text("text"))
        elif kind == "thinking":
            thoughts.append(block.text("thinking"))
        elif kind == "tool_use":
            calls.append(_call(block))
        elif kind != "redacted_thinking":  # another model's reasoning, encrypted
            raise _unsupported(block, kind)
    made: JsonObject = {"role": "assistant", "content": "".join(texts)}
    if calls:
        made["tool_calls"] = calls
    if reasoning := "".join(thoughts):
        made["reasoning_content"] = reasoning
    return made


def _call(block: Fields) -> JsonObject:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise block.wrong("input", "an object")
    return {
        "id": block.text("id"),
        "type": "function",
        "function": {"name": block.text("name"), "arguments": arguments},
    }
