"""Ids of tool calls in chat messages. Every call gets an id, which the tool message that answers it repeats."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from mcore_rl.errors import DataError
from mcore_rl.types.chat import ChatCall, ChatMessage

NewId = Callable[[str, str, int], str]
"""Function from (id of a call, name of the tool, number of the call in the conversation) to a new id."""


def call_id(number: int) -> str:
    """Return the id of a call without id: nine letters and digits, which some templates require."""
    return f"call{number:05d}"


def chat_call(name: str, arguments: Mapping[str, object], given_id: str) -> ChatCall:
    """Return a call as part of a message."""
    return {"id": given_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def with_call_ids(messages: Sequence[ChatMessage], where: str, *, strict: bool) -> list[ChatMessage]:
    """Add missing ids. A tool message without id answers the first open call with its `name`, else the first open call.

    Unless `strict`, a tool message may have the id of no call.

    Raises: DataError for a tool message that answers no call of the preceding turn.
    """
    completed: list[ChatMessage] = []
    # Open calls of the latest assistant turn that has any; None before the first such turn.
    calls: list[ChatCall] | None = None
    number = 0
    for place, message in enumerate(messages):
        made = message.copy()
        if given := message.get("tool_calls"):
            calls = _with_ids(given, _given_ids(messages[place + 1 :]), number)
            number += len(calls)
            made["tool_calls"] = list(calls)
        elif made["role"] == "tool" and calls is not None:
            call = _answered_call(made, calls)
            if call is not None:
                calls.remove(call)
                made["tool_call_id"] = call["id"]
            elif strict:
                ids = ", ".join(str(each["id"]) for each in calls) or "none"
                raise DataError(
                    f"{where}: message {place + 1} answers tool call {made.get('tool_call_id')!r}, but the open calls "
                    f"before it are: {ids}"
                )
        completed.append(made)
    return completed


def with_new_ids(messages: Sequence[ChatMessage], new_id: NewId) -> list[ChatMessage]:
    """Replace the ids of calls and of the tool messages that answer them."""
    made: list[ChatMessage] = []
    names: dict[str, str] = {}
    number = 0
    for message in messages:
        message = message.copy()
        if calls := message.get("tool_calls"):
            # Conversations may reuse an id: a tool message refers to the latest call with it.
            names |= {
                call["id"]: new_id(call["id"], call["function"]["name"], number + place)
                for place, call in enumerate(calls)
            }
            number += len(calls)
            message["tool_calls"] = [{**call, "id": names[call["id"]]} for call in calls]
        if (given := message.get("tool_call_id", "")) in names:
            message["tool_call_id"] = names[given]
        made.append(message)
    return made


def kimi_id(given: str, name: str, number: int) -> str:
    """Return an id in the format of Kimi-K2, whose template takes the tool's name from the id."""
    return given if re.fullmatch(rf"(functions\.)?{re.escape(name)}:\d+", given) else f"functions.{name}:{number}"


def nine_characters(given: str, name: str, number: int) -> str:
    """Return an id in the format of Mistral's templates."""
    return given if re.fullmatch(r"[a-zA-Z0-9]{9}", given) else call_id(number)


def _given_ids(after: Sequence[ChatMessage]) -> list[str]:
    """Return the ids of the immediately following tool messages."""
    ids: list[str] = []
    for message in after:
        if message["role"] != "tool":
            break
        ids += [message["tool_call_id"]] if message.get("tool_call_id") else []
    return ids


def _with_ids(calls: Sequence[ChatCall], answered: Sequence[str], number: int) -> list[ChatCall]:
    """Add ids to calls without one: unused ids of the answers in their order, then new ids."""
    own = {call.get("id") for call in calls}
    free = iter([each for each in answered if each not in own])
    return [{**call, "id": call.get("id") or next(free, call_id(number + place))} for place, call in enumerate(calls)]


def _answered_call(message: ChatMessage, calls: Sequence[ChatCall]) -> ChatCall | None:
    given, name = message.get("tool_call_id"), message.get("name")
    if given is not None:
        return next((call for call in calls if call["id"] == given), None)
    return next((call for call in calls if call["function"]["name"] == name), calls[0] if calls else None)
