"""Streamed replies whose reasoning and content alternate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mcore_rl.rollout.gateway.dialects import messages, responses
from mcore_rl.rollout.gateway.dialects.interface import Call, Event
from mcore_rl.rollout.gateway.exchange import ChatReply, Choice
from mcore_rl.rollout.gateway.progress import ReplyStart, TextDelta
from mcore_rl.types.chat import ChatCall
from tests.unit.rollout.gateway.scripted import adding
from tests.unit.rollout.gateway.test_dialects import read

ALTERNATING = [
    TextDelta(0, "reasoning", 0, "a"),
    TextDelta(0, "content", 0, "one"),
    TextDelta(0, "reasoning", 1, "\nb"),
    TextDelta(0, "content", 3, " two"),
]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("calls", [(), (adding(),)])
def test_streamed_items_are_read_back_like_the_whole_reply(first: int, calls: tuple[ChatCall, ...]) -> None:
    """Otherwise, the next request would not continue the sampled tokens. The reply may end with either text."""
    call, pieces = read(responses, include=[responses.LOGPS]), ["a", "one", "b", " two", "."]
    deltas = [ALTERNATING[1], replace(ALTERNATING[0], text="a\nb")] if first else ALTERNATING
    deltas = [replace(delta, first_token=k, tokens=[(pieces[k], 0.0)]) for k, delta in enumerate(deltas)]
    content, reason = "one" if first else "one two", "tool_calls" if calls else "stop"
    made = Choice(content, "a\nb", calls, reason, [0] * 5, [0.0] * 5, pieces)  # type: ignore[arg-type]
    events, reply = call.events(), ChatReply("r", [made], 1, 0)
    *_, last = [*events.more(ReplyStart("r", 1, 0), deltas), *events.end(reply)]
    output: Any = last.data["response"]["output"]  # type: ignore[index,call-overload]
    whole: Any = call.body(reply)["output"]
    asked = {"role": "user", "content": "q"}
    expected = read(responses, input=[asked, *whole, asked]).request.messages
    assert read(responses, input=[asked, *output, asked]).request.messages == expected
    assert len(expected) == 3
    tokens = [token for item in output for part in item.get("content", ()) for token in part.get("logprobs", ())]
    assert [token["token"] for token in tokens] == pieces


def test_texts_that_alternate_have_several_items_and_blocks() -> None:
    """A block that is closed cannot grow: reasoning after content starts another one."""
    made = Choice("one two", "a\nb", [adding()], "tool_calls", [], [], [])

    def events(call: Call) -> list[Event]:
        made_of = call.events()
        return [*made_of.more(ReplyStart("r", 1, 0), ALTERNATING), *made_of.end(ChatReply("r", [made], 1, 0))]

    found = events(read(responses))
    output = found[-1].data["response"]["output"]  # type: ignore[index,call-overload]
    kinds = ["reasoning", "message", "reasoning", "message", "function_call"]
    assert [item["type"] for item in output] == kinds
    assert len({item["id"] for item in output}) == 5
    assert [event.data["item"] for event in found if event.name == "response.output_item.done"] == output
    started = [event.data for event in events(read(messages, thinking={"type": "adaptive"}))]
    blocks = [data["content_block"]["type"] for data in started if data["type"] == "content_block_start"]
    assert blocks == ["thinking", "text", "thinking", "text", "tool_use"]
