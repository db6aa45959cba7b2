"""Ids of tool calls in chat messages. Every call gets an id, which the tool message that answers it repeats."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mcore_rl.errors import DataError

Message = Mapping[str, Any]
NewId = Callable[[str, str, int], str]
"""Function from (id of a call, name of the tool, number of the call in the conversation) to a new id."""


def call_id(number: int) -> str:
    """Return the id of a call without id: nine letters and digits, which some templates require."""
    return f"call{number:05d}"


def with_call_ids(messages: Sequence[Message], where: str, *, strict: bool) -> list[dict[str, Any]]:
    """Add missing ids. A tool message without id answers the first open call with its `name`, else the first open call.

    Unless `strict`, a tool message may have the id of no call.

    Raises: DataError for a tool message that answers no call of the preceding turn.
    """
    completed: list[dict[str, Any]] = []
    # Open calls of the latest assistant turn that has any; None before the first such turn.
    calls: list[dict[str, Any]] | None = None
    number = 0
    for place, message in enumerate(messages):
        made = dict(message)
        if made.get("tool_calls"):
            calls = _with_ids(made["tool_calls"], _given_ids(messages[place + 1 :]), number)
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


def with_new_ids(messages: Sequence[Message], new_id: NewId) -> list[dict[str, Any]]:
    """Replace the ids of calls and of the tool messages that answer them."""
    made: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    number = 0
    for message in messages:
        message = dict(message)
        if calls := message.get("tool_calls"):
            # Conversations may reuse an id: a tool message refers to the latest call with it.
            names |= {
                call["id"]: new_id(call["id"], call["function"]["name"], number + place)
                for place, call in enumerate(calls)
            }
            number += len(calls)
            message["tool_calls"] = [{**call, "id": names[call["id"]]} for call in calls]
        if (given := message.get("tool_call_id")) in names:
            message["tool_call_id"] = names[given]
        made.append(message)
    return made


def kimi_id(given: str, name: str, number: int) -> str:
    """Return an id in the format of Kimi-K2, whose template takes the tool's name from the id."""
    return given if re.fullmatch(rf"(functions\.)?{re.escape(name)}:\d+", given) else f"functions.{name}:{number}"


def nine_characters(given: str, name: str, number: int) -> str:
    """Return an id in the format of Mistral's templates."""
    return given if re.fullmatch(r"[a-zA-Z0-9]{9}", given) else call_id(number)


def _given_ids(after: Sequence[Message]) -> list[str]:
    """Return the ids of the immediately following tool messages."""
    ids: list[str] = []
    for message in after:
        if message["role"] != "tool":
            break
        ids += [message["tool_call_id"]] if message.get("tool_call_id") else []
    return ids


def _with_ids(calls: Sequence[Message], answered: Sequence[str], number: int) -> list[dict[str, Any]]:
    """Add ids to calls without one: unused ids of the answers in their order, then new ids."""
    own = {call.get("id") for call in calls}
    free = iter([each for each in answered if each not in own])
    return [{**call, "id": call.get("id") or next(free, call_id(number + place))} for place, call in enumerate(calls)]


def _answered_call(message: Message, calls: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    given, name = message.get("tool_call_id"), message.get("name")
    if given is not None:
        return next((call for call in calls if call["id"] == given), None)
    return next((call for call in calls if call["function"]["name"] == name), calls[0] if calls else None)
