"""Anthropic's client against the server. Replies are validated by the client's own models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from mcore_rl.rollout.gateway.exchange import RefusedError
from tests.unit.rollout.gateway.scripted import ADD, KEY, MODEL, ScriptedSessions

TOOLS = [{"name": "add", "description": ADD["description"], "input_schema": ADD["parameters"]}]
QUESTION = {"role": "user", "content": "2 + 3?"}
EVENT = TypeAdapter(RawMessageStreamEvent)
ASKED = {"model": "any", "max_tokens": 99}
THINKING = {"type": "enabled", "budget_tokens": 1024}


@pytest.fixture
def client(address: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=f"{address}/sessions/s1", api_key=KEY, max_retries=0) as made:
        yield made


@pytest.mark.parametrize("stream", [False, True])
def test_loop_with_tools_sends_the_turn_back_whole(
    client: anthropic.Anthropic, sessions: ScriptedSessions, stream: bool
) -> None:
    messages: list = [QUESTION]
    asked = {**ASKED, "tools": TOOLS, "thinking": THINKING, "system": [{"type": "text", "text": "Compute."}]}
    for _ in range(2):
        if stream:
            with client.messages.stream(messages=messages, **asked) as events:
                for event in events:
                    if event.type in ("message_start", "content_block_start", "content_block_delta", "message_delta"):
                        EVENT.validate_python(event.model_dump(mode="json", exclude_unset=True))
                reply = events.get_final_message()
        else:
            reply = client.messages.create(messages=messages, **asked)
        Message.model_validate(reply.model_dump(mode="json", exclude_unset=True, warnings=False))
        messages.append({"role": "assistant", "content": reply.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "5"}]}
            for block in reply.content
            if block.type == "tool_use" and block.input == {"a": 2, "b": 3, "unit": "µm"}
        ]
        messages.append({"role": "user", "content": [*results, {"type": "text", "text": "Go on."}]})
        if not results:
            break
        assert reply.stop_reason == "tool_use"
        messages[-1]["content"].pop()
    assert [block.type for block in reply.content] == ["thinking", "text"]
    assert reply.content[1].text == "The sum is 5."
    assert (reply.stop_reason, reply.usage.input_tokens, reply.usage.output_tokens) == ("end_turn", 11, 10)
    second = sessions.requests[1].messages
    assert [each["role"] for each in second] == ["system", "user", "assistant", "tool", "tool"]
    assert (second[2]["content"], second[2]["reasoning_content"]) == ("Let me see.", "I need the tool.")
    assert [call["id"] for call in second[2]["tool_calls"]] == [each["tool_call_id"] for each in second[3:]]
    assert sessions.requests[0].tools == [{"type": "function", "function": ADD}]


def test_reply_without_thinking_begins_with_its_text(client: anthropic.Anthropic) -> None:
    reply = client.messages.create(messages=[QUESTION], **ASKED)
    assert [block.type for block in reply.content] == ["text"]
    assert reply.content[0].text == "Good day — to you!"
    assert reply.model == MODEL


@pytest.mark.parametrize(
    ("status", "error", "kind"),
    [
        (400, anthropic.BadRequestError, "invalid_request_error"),
        (429, anthropic.RateLimitError, "rate_limit_error"),
        (503, anthropic.InternalServerError, "overloaded_error"),
    ],
)
def test_errors_have_the_vendors_form(
    client: anthropic.Anthropic,
    sessions: ScriptedSessions,
    status: int,
    error: type[anthropic.APIStatusError],
    kind: str,
) -> None:
    sessions.refusal = RefusedError(status, "wait")
    with pytest.raises(error) as caught:
        client.messages.create(messages=[QUESTION], **ASKED)
    assert caught.value.body == {"type": "error", "error": {"type": kind, "message": "wait"}}


@pytest.mark.parametrize("status", [500, 503])
def test_an_error_in_the_middle_of_a_stream_is_raised(
    client: anthropic.Anthropic, sessions: ScriptedSessions, status: int
) -> None:
    sessions.breaks, texts = RefusedError(status, "try again"), list[str]()
    with (
        pytest.raises(anthropic.APIStatusError, match="try again") as caught,
        client.messages.stream(messages=[QUESTION], **ASKED) as stream,
    ):
        texts += stream.text_stream
    kind = "overloaded_error" if status == 503 else "api_error"
    assert caught.value.body == {"type": "error", "error": {"type": kind, "message": "try again"}}
    assert "".join(texts) == "Good day — to"


def test_models_are_listed(client: anthropic.Anthropic) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_tokens_of_a_prompt_are_counted(client: anthropic.Anthropic, sessions: ScriptedSessions) -> None:
    tool: Any = {"name": "look", "description": "Look.", "input_schema": {"type": "object", "properties": {}}}
    counted = client.messages.count_tokens(model="any", system="Be brief.", messages=[QUESTION], tools=[tool])
    assert counted.input_tokens == 21
    assert not sessions.requests, "nothing is sampled"
    sessions.refusal = RefusedError(400, "too long")
    with pytest.raises(anthropic.BadRequestError, match="too long"):
        client.messages.count_tokens(model="any", messages=[QUESTION])
