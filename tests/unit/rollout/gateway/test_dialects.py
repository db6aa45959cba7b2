"""Requests and replies of the dialects without a server."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from types import ModuleType

import pytest
from anthropic.types import message_create_params
from anthropic.types.beta import message_create_params as beta_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params
from packaging.version import Version

from mcore_rl.rollout.gateway.dialects import chat_completions, completions, messages, replies, responses
from mcore_rl.rollout.gateway.dialects.interface import Call, Event
from mcore_rl.rollout.gateway.exchange import ChatReply, Choice, RefusedError
from mcore_rl.rollout.gateway.progress import ReplyStart, TextDelta
from tests.unit.rollout.gateway.scripted import ADD, choice

REVIEWED = {"openai": "3.57.0", "anthropic": "2.14.0"}
"""Newest versions of the clients whose fields are in the tables."""
USER = {"role": "user", "content": "hello"}
BODIES: Mapping[ModuleType, dict] = {
    chat_completions: {"messages": [USER]},
    completions: {"prompt": "hello"},
    responses: {"input": "hello"},
    messages: {"messages": [USER]},
}


def read(module: ModuleType, **fields: object) -> Call:
    return module.read({**BODIES[module], **fields}, "tiny", lambda reply: None)


def refusal(module: ModuleType, **fields: object) -> str:
    with pytest.raises(RefusedError) as caught:
        read(module, **fields)
    assert caught.value.status == 400
    return str(caught.value)


@pytest.mark.parametrize(
    ("module", "params"),
    [
        (chat_completions, chat_params.CompletionCreateParamsStreaming),
        (completions, completion_create_params.CompletionCreateParamsStreaming),
        (responses, response_create_params.ResponseCreateParamsStreaming),
        (messages, message_create_params.MessageCreateParamsStreaming),
        (messages, beta_params.MessageCreateParamsStreaming),
    ],
)
def test_every_field_of_the_official_client_is_in_one_list(module: ModuleType, params: type) -> None:
    client = params.__module__.partition(".")[0]
    if Version(version(client)) > Version(REVIEWED[client]):
        pytest.skip(f"{client} may have new fields: sort them into the tables, then change REVIEWED")
    table = module.FIELDS
    known = table.read | table.ignored | set(table.refused)
    assert set(typing.get_type_hints(params)) - known == set()
    assert len(known) == len(table.read) + len(table.ignored) + len(table.refused)


@pytest.mark.parametrize("module", BODIES)
def test_refused_fields_are_named_and_neutral_values_accepted(module: ModuleType) -> None:
    for name, rule in module.FIELDS.refused.items():
        assert f"`{name}`" in refusal(module, **{name: {"type": "json_schema", "format": {"type": "json_schema"}}})
        for value in (None, *rule.neutral):
            read(module, **{name: value})


@pytest.mark.parametrize("module", BODIES)
def test_ignored_and_unknown_fields_change_nothing(module: ModuleType) -> None:
    fields = {name: {"deep": [1, "x"]} for name in (*module.FIELDS.ignored, "invented")}
    assert read(module, **fields).request == read(module).request


@pytest.mark.parametrize(
    ("module", "fields", "problem"),
    [
        (chat_completions, {"messages": []}, "messages has no messages"),
        (chat_completions, {"messages": None}, "messages has no messages"),
        (chat_completions, {"messages": "hi"}, "messages must be a list of objects, not a string"),
        (chat_completions, {"messages": ["hi"]}, "messages[0] must be an object"),
        (chat_completions, {"messages": [{"content": "x"}]}, "messages[0].role must be a string, not absent"),
        (chat_completions, {"messages": [{"role": "god", "content": "x"}]}, "roles are: developer, system"),
        (chat_completions, {"messages": [{"role": "user"}]}, "message 1 (user) has no `content`"),
        (
            chat_completions,
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
            "messages[0].content[0] is of type 'input_audio'; only text and images are supported",
        ),
        (
            chat_completions,
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "not valid JSON",
        ),
        (chat_completions, {"tool_choice": "required"}, "tool_choice cannot force a call"),
        (chat_completions, {"tool_choice": {"type": "function"}}, "tool_choice cannot force a call"),
        (chat_completions, {"tools": [{"type": "custom"}]}, "tools[0] must be {type: function"),
        (chat_completions, {"tools": [{"function": {"name": "a b"}}]}, "'a b' is not a valid tool name"),
        (
            chat_completions,
            {"tools": [{"function": {"name": "f", "parameters": {"type": "object", "properties": 3}}}]},
            "not a JSON schema",
        ),
        (chat_completions, {"temperature": -0.1}, "temperature must be a number from 0 to 2, not -0.1"),
        (chat_completions, {"temperature": 10**400}, "temperature must be a number from 0 to 2"),
        (chat_completions, {"temperature": True}, "temperature must be a number from 0 to 2, not true"),
        (chat_completions, {"top_p": 0}, "top_p must be a number above 0"),
        (chat_completions, {"n": 0}, "n must be an integer from 1"),
        (chat_completions, {"n": 1.5}, "n must be an integer from 1"),
        (chat_completions, {"stop": ["a", ""]}, "stop must be a string or a list of strings that are not empty"),
        (chat_completions, {"stream": "yes"}, "stream must be true or false"),
        (
            chat_completions,
            {"max_tokens": 5, "max_completion_tokens": 6},
            "max_completion_tokens and max_tokens differ",
        ),
        (chat_completions, {"logprobs": True, "top_logprobs": 3}, "only sampled tokens have log-probabilities"),
        (completions, {"prompt": ["a", "b"]}, "send each prompt as a request"),
        (completions, {"prompt": [1, -2]}, "one list of token ids"),
        (completions, {"prompt": ""}, "prompt must be a text or a list of token ids"),
        (completions, {"best_of": 3}, "best_of must be equal to n"),
        (completions, {"logprobs": 1}, "only sampled tokens have log-probabilities"),
        (responses, {"input": None}, "input must be a text or a list of items, not absent"),
        (responses, {"input": []}, "input has no messages"),
        (responses, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0] is of type 'item_reference'"),
        (responses, {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "of type 'input_file'"),
        (responses, {"tools": [{"type": "web_search"}]}, "only functions are supported"),
        (responses, {"tool_choice": {"type": "allowed_tools"}}, "tool_choice cannot force a call"),
        (responses, {"text": {"format": {"type": "grammar"}}}, "text.format.type is 'grammar'; types are: text"),
        (responses, {"previous_response_id": "r"}, "previous_response_id 'r' is not kept any more"),
        (messages, {"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "of type 'document'"),
        (messages, {"messages": [{"role": "tool", "content": "x"}]}, "roles are: user, assistant, system"),
        (
            messages,
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "x", "content": [{"type": "document"}]}],
                    }
                ]
            },
            "messages[0].content[0].content[0] is of type 'document'",
        ),
        (messages, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "only tools with an input_schema"),
        (messages, {"tool_choice": {"type": "any"}}, "tool_choice.type cannot force a call"),
        (messages, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "disable_parallel_tool_use"),
        (messages, {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema is absent"),
        (messages, {"max_tokens": 0}, "max_tokens must be an integer from 1"),
    ],
)
def test_invalid_requests_name_the_field(module: ModuleType, fields: dict, problem: str) -> None:
    assert problem in refusal(module, **fields)


@pytest.mark.parametrize("module", BODIES)
def test_metadata_names_the_role_of_a_request(module: ModuleType) -> None:
    assert read(module).request.role == ""
    assert read(module, metadata={"user_id": "u"}).request.role == ""
    assert read(module, metadata={"role": "critic"}).request.role == "critic"
    assert "metadata.role" in refusal(module, metadata={"role": 3})
    assert refusal(module, metadata={"role": "r" * 65}) == "metadata.role has 65 characters; use at most 64"


def test_sampling_has_the_names_of_the_engine() -> None:
    given = {"temperature": 1, "top_p": 0.9, "top_k": 0, "min_p": 0.1}
    expected = {"temperature": 1.0, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "max_response_tokens": 7, "stop": ("a",)}
    assert read(chat_completions, **given, max_completion_tokens=7, max_tokens=7, stop="a").request.sampling == expected
    assert read(completions, **given, max_tokens=7, stop=["a"]).request.sampling == expected
    assert read(messages, **given, max_tokens=7, stop_sequences=["a"]).request.sampling == expected
    without_stop = {name: value for name, value in expected.items() if name != "stop"}
    assert read(responses, **given, max_output_tokens=7).request.sampling == without_stop


def test_tools_absent_are_the_sessions_and_none_are_hidden() -> None:
    chat = [{"type": "function", "function": {**ADD, "strict": True}}]
    flat = [{"type": "function", **ADD}]
    blocks = [
        {"name": "add", "description": ADD["description"], "input_schema": ADD["parameters"], "cache_control": {}}
    ]
    for module, tools, none in (
        (chat_completions, chat, "none"),
        (responses, flat, "none"),
        (messages, blocks, {"type": "none"}),
    ):
        assert read(module).request.tools is None
        assert read(module, tools=tools).request.tools == [{"type": "function", "function": ADD}]
        assert read(module, tools=tools, tool_choice=none).request.tools == []
        assert read(module, tools=[]).request.tools == []


def test_anthropic_blocks_become_messages_in_their_order() -> None:
    sent = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "c"},
                {"type": "text", "text": "d"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "is_error": True},
                {"type": "text", "text": "e"},
                {"type": "tool_result", "tool_use_id": "1", "content": "f"},
            ],
        },
        {"role": "assistant", "content": []},
    ]
    found = read(messages, messages=sent, system="s").request.messages
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    assert found == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "cd", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": ""},
        {"role": "user", "content": "e"},
        {"role": "tool", "tool_call_id": "1", "content": "f"},
        {"role": "assistant", "content": ""},
    ]


def test_response_items_of_one_turn_become_one_message() -> None:
    def called(number: int) -> dict:
        return {"type": "function_call", "call_id": str(number), "name": "f", "arguments": "{}"}

    sent = [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "m"}]},
        called(1),
        called(2),
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "o"}]},
        called(3),
        {"role": "assistant", "content": "n"},
        {"role": "assistant", "content": "p"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"role": "developer", "content": "q"},
    ]
    found = read(responses, input=sent).request.messages
    assert [each["role"] for each in found] == ["assistant", "tool", *["assistant"] * 4, "system"]
    assert (found[0]["reasoning_content"], found[0]["content"]) == ("r", "m")
    assert [[call["id"] for call in each.get("tool_calls", ())] for each in found[:3]] == [["1", "2"], [], ["3"]]
    assert [each["content"] for each in found[3:5]] == ["n", "p"]
    assert found[5] == {"role": "assistant", "content": "", "reasoning_content": "s"}


def _joined(events: Iterable[Event], *names: str) -> str:
    """Join the values of `names` in the events, at any depth."""

    def find(value: object) -> str:
        if isinstance(value, list):
            return "".join(map(find, value))
        if not isinstance(value, dict):
            return ""
        return "".join(each if key in names and isinstance(each, str) else find(each) for key, each in value.items())

    return "".join(find(event.data) for event in events)


@pytest.mark.parametrize("thought", ["", "Think.\nTwice."])
@pytest.mark.parametrize("streamed", range(6))
def test_deltas_concatenate_to_the_texts(thought: str, streamed: int) -> None:
    """The first deltas are sent while the reply is sampled, and the end adds what is missing."""
    made = choice("Good day — to you!", thought, logps=True)
    reply = ChatReply("r", [made], 1, 0)
    deltas = [TextDelta(0, "reasoning", 0, "Think."), TextDelta(0, "reasoning", 6, "\nTwice.")] if thought else []
    deltas += [TextDelta(0, "content", start, text) for start, text in ((0, "Good"), (4, " day"), (8, " —"))]

    def texts(call: Call, *names: str) -> str:
        events = call.events()
        found = [event for delta in deltas[:streamed] for event in events.more(ReplyStart("r", 1, 0), [delta])]
        return _joined([*found, *events.end(reply)], *names)

    shown = {"type": "adaptive"}
    assert texts(read(chat_completions), "content") == made.content
    assert texts(read(chat_completions), "reasoning_content") == thought
    if not thought:  # this interface has none
        assert texts(read(completions), "text") == made.content
    assert texts(read(responses), "delta") == thought + made.content
    assert texts(read(messages, thinking=shown), "text") == made.content
    assert texts(read(messages, thinking=shown), "thinking") == thought


def test_log_probabilities_of_all_tokens_are_sent_once() -> None:
    made = choice("Good day to you!", "Yes.", logps=True)
    tokens = replies.tokens_of(made)
    deltas = [
        TextDelta(0, "reasoning", 0, "Yes.", 0, tokens[:2]),
        TextDelta(0, "content", 0, "Good", 2, tokens[2:4]),
        TextDelta(0, "content", 4, " day", 4, tokens[4:5]),
    ]
    for module, fields, name in (
        (chat_completions, {"logprobs": True}, "token"),
        (responses, {"include": [responses.LOGPS]}, "token"),
    ):
        events = read(module, **fields).events()
        found = [*events.more(ReplyStart("r", 1, 0), deltas), *events.end(ChatReply("r", [made], 1, 0))]
        sent = [event for event in found if "done" not in (event.name or "") and "completed" not in (event.name or "")]
        assert _joined(sent, name) == "".join(made.pieces)


def test_a_reply_that_differs_from_its_beginning_is_refused() -> None:
    events = read(chat_completions).events()
    list(events.more(ReplyStart("r", 1, 0), [TextDelta(0, "content", 0, "Good")]))
    with pytest.raises(RefusedError, match="another text"):
        list(events.end(ChatReply("r", [choice("Bad")], 1, 0)))


@pytest.mark.parametrize(
    ("reason", "stops", "expected"),
    [
        ("stop", [], ("end_turn", None)),
        ("length", ["x"], ("max_tokens", None)),
        ("###", ["x", "###"], ("stop_sequence", "###")),
        ("###", ["x"], ("end_turn", None)),  # a stop string of the run
    ],
)
def test_anthropic_stop_reasons_follow_the_clients_sequences(reason: str, stops: list, expected: tuple) -> None:
    call = read(messages, stop_sequences=stops)
    reply = ChatReply("r", [choice("hi", reason=reason)], 1, 0)
    (end,) = [event.data["delta"] for event in call.events().end(reply) if event.name == "message_delta"]
    body = call.body(reply)
    assert (end["stop_reason"], end["stop_sequence"]) == (body["stop_reason"], body["stop_sequence"]) == expected


def test_response_that_reached_its_limit_is_incomplete() -> None:
    call, reply = read(responses), ChatReply("r", [choice("hi", reason="length")], 1, 0)
    body = call.body(reply)
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [event.name for event in call.events().end(reply)][-1] == "response.incomplete"


def test_log_probabilities_are_finite_json() -> None:
    made = Choice("a\ufffd", "", (), "stop", [1, 2], [-0.5, float("-inf")], ["a", "\ufffd"])
    reply = ChatReply("r", [made], 1, 0)
    found = read(chat_completions, logprobs=True).body(reply)["choices"][0]["logprobs"]["content"]
    assert [(each["logprob"], each["bytes"]) for each in found] == [(-0.5, [97]), (-9999.0, [])]
    assert read(completions, logprobs=0).body(reply)["choices"][0]["logprobs"]["token_logprobs"] == [-0.5, -9999.0]


def test_events_are_single_lines_of_json() -> None:
    reply = ChatReply("r", [choice("two\n\nlines\r\u2028", "more\n")], 1, 0)
    for module in BODIES:
        for event in read(module).events().end(reply):
            *_, data = event.encoded().decode().removesuffix("\n\n").split("\n")
            assert data == "data: [DONE]" or json.loads(data.removeprefix("data: "))
