"""Conversion of a sampled turn to a conversation message that can be rendered again, including the answered calls."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from mcore_rl.data.chat.conversation import Conversation, SampledCall
from mcore_rl.data.chat.messages import call_id
from mcore_rl.rollout.tools.parsers import MalformedCall, ParsedMessage, ToolCall
from mcore_rl.types.chat import ChatMessage

Call = ToolCall | MalformedCall


def turn_message(
    conversation: Conversation, parsed: ParsedMessage, written: str, after: Sequence[ChatMessage]
) -> ChatMessage:
    """Return the assistant's message for the turn `parsed`, whose text is `written`, and which is followed by `after`.

    Every answered call is included, executed or not, with the model's arguments. Unreadable calls become text: part of
    the content if they come first; otherwise the whole turn becomes text as written. Without any answer the turn is
    text, too, because templates render `tool_calls` as executed calls.
    """
    reasoning = parsed.reasoning or None
    answers = [message for message in after if message["role"] == "tool"]
    if not parsed.calls:
        return conversation.turn(parsed.content, reasoning=reasoning)
    shown = _answered(parsed.calls, answers)
    # Templates render content before calls, so unreadable calls can only be shown as text if they come first.
    unreadable = list(itertools.takewhile(lambda numbered: _unreadable(numbered[1]), shown))
    readable = shown[len(unreadable) :]
    if not shown or any(_unreadable(call) for _, call in readable):
        return conversation.turn(_without_reasoning(written, parsed), reasoning=reasoning)
    texts = [call.text for _, call in unreadable if isinstance(call, MalformedCall)]
    content = "\n".join(filter(None, [parsed.content, *texts]))
    calls: list[SampledCall] = [
        {"name": call.name or "", "arguments": call.arguments or {}, "id": call.id or call_id(number)}
        for number, call in readable
    ]
    return conversation.turn(content, reasoning=reasoning, calls=calls)


def report_of(calls: Sequence[Call], limit: int = 500) -> str:
    """Return a text for the model about calls that were not executed because only one call per turn is allowed."""
    described = "; ".join(_described(call) for call in calls)
    described = described if len(described) <= limit else f"{described[:limit]}..."
    return (
        f"Error: a message may call one tool, and {len(calls)} further calls were not executed: {described}. Call one "
        "tool, and the next after its answer."
    )


def _answered(calls: Sequence[Call], answers: Sequence[ChatMessage]) -> list[tuple[int, Call]]:
    """Return the numbered calls that have an answer: matched by id, or by order if the answers have no ids of calls."""
    numbered = list(enumerate(calls))
    ids = {call.id or call_id(number): (number, call) for number, call in numbered}
    given = [message.get("tool_call_id") for message in answers]
    if answers and all(each in ids for each in given):
        return sorted((ids[str(each)] for each in set(given)), key=lambda pair: pair[0])
    return numbered[: len(answers)]


def _unreadable(call: Call) -> bool:
    return call.name is None or call.arguments is None


def _described(call: Call) -> str:
    if isinstance(call, ToolCall):
        return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"
    return call.text


def _without_reasoning(written: str, parsed: ParsedMessage) -> str:
    if not parsed.reasoning:
        return written.strip()
    for close in ("</think>", "[/THINK]"):
        if close in written:
            return written.rpartition(close)[2].strip()
    return parsed.content
