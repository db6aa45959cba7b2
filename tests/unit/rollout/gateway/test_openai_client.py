"""OpenAI's client against the server. Replies are validated by the client's own models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseErrorEvent, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from mcore_rl.rollout.gateway.exchange import RefusedError
from tests.unit.rollout.gateway.scripted import ADD, KEY, MODEL, ScriptedSessions

CHAT_TOOLS = [{"type": "function", "function": ADD}]
RESPONSE_TOOLS = [{"type": "function", "strict": True, **ADD}]
QUESTION = {"role": "user", "content": "2 + 3?"}
EVENT = TypeAdapter(ResponseStreamEvent)


@pytest.fixture
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/sessions/s1/v1", api_key=KEY, max_retries=0) as made:
        yield made


def valid(model: type[BaseModel], found: BaseModel) -> BaseModel:
    """Validate strictly: the client itself accepts replies without required fields."""
    return model.model_validate(found.model_dump(mode="json", exclude_unset=True, by_alias=True))


@pytest.mark.parametrize("stream", [False, True])
def test_chat_loop_with_tools_sends_the_turn_back_whole(
    client: openai.OpenAI, sessions: ScriptedSessions, stream: bool
) -> None:
    messages: list = [{"role": "developer", "content": "Compute."}, QUESTION]
    for _ in range(2):
        if stream:
            state = ChatCompletionStreamState()
            for chunk in client.chat.completions.create(model="any", messages=messages, tools=CHAT_TOOLS, stream=True):
                valid(ChatCompletionChunk, chunk)
                state.handle_chunk(chunk)
            reply = state.get_final_completion()
        else:
            reply = client.chat.completions.create(model="any", messages=messages, tools=CHAT_TOOLS)
            valid(ChatCompletion, reply)
        message = reply.choices[0].message
        messages.append(message.model_dump())
        for call in message.tool_calls or ():
            assert json.loads(call.function.arguments) == {"a": 2, "b": 3, "unit": "µm"}
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "5"})
    assert message.content == "The sum is 5."
    assert reply.choices[0].finish_reason == "stop"
    second = list(sessions.requests[1].messages)
    assert [each["role"] for each in second] == ["system", "user", "assistant", "tool", "tool"]
    assert second[2] == {
        "role": "assistant",
        "content": "Let me see.",
        "reasoning_content": "I need the tool.",
        "tool_calls": [
            {
                "id": f"call_{n}",
                "type": "function",
                "function": {"name": "add", "arguments": {"a": 2, "b": 3, "unit": "µm"}},
            }
            for n in range(2)
        ],
    }
    assert sessions.requests[0].tools == [{"type": "function", "function": ADD}]


def test_chat_stream_has_texts_log_probabilities_and_usage_of_the_reply(
    client: openai.OpenAI, sessions: ScriptedSessions
) -> None:
    asked = {"model": "any", "messages": [QUESTION], "n": 2, "logprobs": True}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert whole.usage == chunks[-1].usage
    for number, expected in enumerate(whole.choices):
        parts = [part for chunk in chunks for part in chunk.choices if part.index == number]
        assert "".join(part.delta.content or "" for part in parts) == expected.message.content
        logps = [each for part in parts if part.logprobs for each in part.logprobs.content]
        assert logps == expected.logprobs.content
        assert [each.token for each in logps[:3]] == ["<think>", "Be", " polite."]
        # Each delta has the tokens that it ends with.
        texts = [part for part in parts if part.delta.content]
        assert texts[1].logprobs.content[0].token == texts[1].delta.content == " day"
        assert [part.finish_reason for part in parts if part.finish_reason] == ["stop"]
    assert sessions.requests[0].top_logprobs == 0
    assert len(whole.choices) == 2


@pytest.mark.parametrize("prompt", ["Once", [3, 1, 4], ["Once"], [[3, 1, 4]]])
def test_completions_continue_texts_and_token_ids(
    client: openai.OpenAI, sessions: ScriptedSessions, prompt: object
) -> None:
    reply = client.completions.create(model="any", prompt=prompt, logprobs=0, max_tokens=5, stop="x", seed=1)
    valid(Completion, reply)
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == (" and so on", "length")
    assert reply.choices[0].logprobs.text_offset == [0, 0, 4, 7, 10]
    events = list(client.completions.create(model="any", prompt=prompt, logprobs=0, stream=True))
    parts = [event.choices[0] for event in events]
    assert "".join(part.text for part in parts) == " and so on"
    for name in ("tokens", "token_logprobs", "text_offset"):
        joined = [each for part in parts if part.logprobs for each in getattr(part.logprobs, name)]
        assert joined == getattr(reply.choices[0].logprobs, name)
    assert parts[0].logprobs.tokens == ["", " and"]
    assert sessions.requests[0].prompt == ("Once" if "Once" in prompt else [3, 1, 4])
    assert sessions.requests[0].sampling == {"max_response_tokens": 5, "stop": ("x",)}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by_id", [False, True])
def test_responses_loop_continues_by_items_or_by_id(
    client: openai.OpenAI, sessions: ScriptedSessions, stream: bool, by_id: bool
) -> None:
    asked: dict = {"model": "any", "instructions": "Compute.", "tools": RESPONSE_TOOLS}
    items: list = [QUESTION]
    previous: dict = {}
    for _ in range(2):
        reply = _response(client, stream, input=items, **asked, **previous)
        outputs = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "5"}
            for item in reply.output
            if item.type == "function_call"
        ]
        if by_id:
            items, previous = outputs, {"previous_response_id": reply.id}
        else:
            items = [*items, *(item.model_dump(exclude_unset=True) for item in reply.output), *outputs]
    assert reply.output_text == "The sum is 5."
    first, second = sessions.requests[0], sessions.requests[-1]
    assert [each["role"] for each in second.messages] == ["system", "user", "assistant", "tool", "tool"]
    assert second.messages[2]["reasoning_content"] == "I need the tool."
    assert second.messages[2]["content"] == "Let me see."
    assert [call["id"] for call in second.messages[2]["tool_calls"]] == ["call_0", "call_1"]
    assert first.tools == second.tools == [{"type": "function", "function": ADD}]


def _response(client: openai.OpenAI, stream: bool, **asked: object) -> Response:
    if not stream:
        reply = client.responses.create(**asked)
        valid(Response, reply)
        return reply
    with client.responses.stream(**asked) as events:
        for number, event in enumerate(each for each in events if each.type != "response.output_text.delta"):
            assert event.sequence_number >= number
        final = events.get_final_response()
    raw = list(client.responses.with_raw_response.create(**asked, stream=True).parse())
    assert [event.sequence_number for event in raw] == list(range(len(raw)))
    for event in raw:
        EVENT.validate_python(event.model_dump(mode="json", exclude_unset=True, by_alias=True))
    return Response.model_validate(final.model_dump(mode="json", exclude_unset=True, by_alias=True, warnings=False))


def test_responses_log_probabilities_are_in_the_output_text(client: openai.OpenAI) -> None:
    asked = {"model": "any", "input": "hello", "include": ["message.output_text.logprobs"]}
    reply = client.responses.create(**asked)
    (text,) = [part for item in reply.output if item.type == "message" for part in item.content]
    deltas = [
        each for each in client.responses.create(**asked, stream=True) if each.type == "response.output_text.delta"
    ]
    tokens = [each.token for delta in deltas for each in delta.logprobs]
    assert tokens == [each.token for each in text.logprobs]
    assert "".join(delta.delta for delta in deltas) == text.text == "Good day — to you!"


def test_async_client_has_parallel_requests(address: str, sessions: ScriptedSessions) -> None:
    sessions.seconds = 0.3

    async def ask() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{address}/sessions/s1/v1", api_key=KEY, max_retries=0) as client:
            asked = [client.chat.completions.create(model="any", messages=[QUESTION]) for _ in range(20)]
            texts = [reply.choices[0].message.content for reply in await asyncio.wait_for(asyncio.gather(*asked), 4)]
            stream = await client.chat.completions.create(model="any", messages=[QUESTION], stream=True)
            return [*texts, "".join([chunk.choices[0].delta.content or "" async for chunk in stream])]

    assert asyncio.run(ask()) == ["Good day — to you!"] * 21


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, openai.BadRequestError),
        (404, openai.NotFoundError),
        (409, openai.ConflictError),
        (429, openai.RateLimitError),
        (503, openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_before_the_first_event_have_their_status(
    client: openai.OpenAI, sessions: ScriptedSessions, status: int, error: type[openai.APIStatusError], stream: bool
) -> None:
    sessions.refusal = RefusedError(status, "shorten it", "context_length_exceeded")
    with pytest.raises(error, match="shorten it") as caught:
        client.chat.completions.create(model="any", messages=[QUESTION], stream=stream)
    assert caught.value.code == "context_length_exceeded"


def _streamed(client: openai.OpenAI, path: str) -> Iterator[str]:
    if path == "chat":
        for chunk in client.chat.completions.create(model="any", messages=[QUESTION], stream=True):
            yield chunk.choices[0].delta.content or ""
    elif path == "completions":
        for event in client.completions.create(model="any", prompt="q", stream=True):
            yield event.choices[0].text
    else:
        for item in client.responses.create(model="any", input="q", stream=True):
            yield item.delta if item.type == "response.output_text.delta" else ""


@pytest.mark.parametrize("path", ["chat", "completions", "responses"])
def test_an_error_in_the_middle_of_a_stream_is_raised(
    client: openai.OpenAI, sessions: ScriptedSessions, path: str
) -> None:
    sessions.breaks, texts = RefusedError(503, "try again", "lost"), list[str]()
    with pytest.raises(openai.APIError, match="try again") as caught:
        texts += _streamed(client, path)
    assert caught.value.code == "lost"
    assert "".join(texts) in ("Good day — to", " and so")


def test_error_events_of_responses_are_numbered(client: openai.OpenAI, sessions: ScriptedSessions) -> None:
    sessions.breaks = RefusedError(503, "try again", "lost")
    with client.responses.with_streaming_response.create(model="any", input="q", stream=True) as raw:
        lines = [line.removeprefix("data: ") for line in raw.iter_lines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    error = ResponseErrorEvent.model_validate(events[-1])
    assert (error.type, error.code, error.message, error.param) == ("error", "lost", "try again", None)


def test_tokens_of_an_input_are_counted(client: openai.OpenAI) -> None:
    counted = client.responses.input_tokens.count(model="any", instructions="Be brief.", input="hello")
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", 20)


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
