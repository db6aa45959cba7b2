"""Formats of replies: requests in all dialects, and reading of reasoning and JSON."""

from __future__ import annotations

import asyncio
import json
import pickle
from dataclasses import replace
from types import ModuleType
from types import SimpleNamespace as Namespace
from typing import Any

import pytest

from mcore_rl.errors import DataError
from mcore_rl.rollout.episodes.sampling import with_format
from mcore_rl.rollout.gateway.dialects import chat_completions, completions, messages, responses
from mcore_rl.rollout.gateway.exchange import ChatReply, RefusedError
from mcore_rl.rollout.gateway.formats.texts import FormatReader, format_of, split_format
from mcore_rl.rollout.gateway.sessions import OpenSession
from mcore_rl.types import JsonFormat, SamplingOptions
from tests.unit.rollout.gateway.scripted import ADD, choice
from tests.unit.rollout.gateway.test_dialects import BODIES, read, refusal

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TAGS = ("<think>", "</think>")


def fields(module: ModuleType, form: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a request with a format in OpenAI's chat form."""
    if module in (chat_completions, completions):
        return {"response_format": form}
    flat = {"type": form["type"], **form.get("json_schema", {})}
    return {"text": {"format": flat}} if module is responses else {"output_config": {"format": flat}}


@pytest.mark.parametrize("module", BODIES)
def test_request_with_schema_has_the_schema_for_engines(module: ModuleType) -> None:
    for strict in ({}, {"strict": True}, {"strict": False}, {"strict": None}):
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, **strict}}
        call = read(module, **fields(module, form))
        assert json.loads(call.request.schema or "") == {**SCHEMA, "additionalProperties": False}


@pytest.mark.parametrize("module", BODIES)
def test_json_object_is_any_object_and_text_is_no_format(module: ModuleType) -> None:
    assert json.loads(read(module, **fields(module, {"type": "json_object"})).request.schema or "") == {
        "type": "object"
    }
    assert read(module, **fields(module, {"type": "text"})).request == read(module).request


@pytest.mark.parametrize("module", BODIES)
def test_wrong_formats_are_refused_with_their_field(module: ModuleType) -> None:
    name = next(iter(fields(module, {"type": "x"})))
    assert f"{name}" in (text := refusal(module, **fields(module, {"type": "grammar"})))
    assert "types are: text, json_object, json_schema" in text
    assert "is absent; send it" in refusal(module, **fields(module, {"type": "json_schema", "json_schema": {}}))
    wrong = {"type": "json_schema", "json_schema": {"schema": {"type": "array", "uniqueItems": True}}}
    assert "keyword `uniqueItems`" in refusal(module, **fields(module, wrong))
    assert "must be an object, not a string" in refusal(module, **{name: "json"})


def test_format_with_tools_is_refused_unless_tools_are_hidden() -> None:
    form = fields(chat_completions, {"type": "json_object"})
    tools = {"tools": [{"type": "function", "function": ADD}]}
    assert "`response_format` and `tools` cannot be combined" in refusal(chat_completions, **form, **tools)
    assert read(chat_completions, **form, **tools, tool_choice="none").request.schema is not None
    flat = {"tools": [{"type": "function", **ADD}]}
    assert "`text.format` and `tools`" in refusal(responses, **fields(responses, {"type": "json_object"}), **flat)
    anthropic = {"tools": [{"name": "add", "input_schema": ADD["parameters"]}]}
    assert "and `tools`" in refusal(messages, **fields(messages, {"type": "json_object"}), **anthropic)


def test_responses_reply_repeats_the_requested_format() -> None:
    form = {"type": "json_schema", "name": "answer", "schema": SCHEMA}
    reply = ChatReply("r", [choice("{}")], 1, 0)
    body: Any = read(responses, text={"format": form}).body(reply)
    assert body["text"] == {"format": form}
    assert read(responses).body(reply)["text"] == {"format": {"type": "text"}}


def context(template: str = "", tokens: tuple[str, ...] = ()) -> Any:
    tokenizer = Namespace(
        chat_template=template, convert_tokens_to_ids=lambda text: 7 if text in tokens else 0, unk_token_id=0
    )
    return Namespace(conversation=Namespace(tokenizer=tokenizer))


@pytest.mark.parametrize(
    ("template", "tokens", "before", "expected"),
    [
        ("", (), "user: hi", JsonFormat()),
        ("{{ '</think>' }}", (), "user: hi", JsonFormat(thought=TAGS)),
        ("", TAGS, "user: hi", JsonFormat(thought=TAGS)),
        ("", TAGS, "user: hi<think>\n", JsonFormat(thought=TAGS, in_thought=True)),
        ("", TAGS, "<think>\n\n</think>\n\n", JsonFormat()),
        ("", ("[THINK]",), "hi", JsonFormat(thought=("[THINK]", "[/THINK]"))),
        ("", TAGS, None, JsonFormat()),
    ],
)
def test_format_allows_reasoning_of_the_chat_format(
    template: str, tokens: tuple[str, ...], before: str | None, expected: JsonFormat
) -> None:
    assert format_of('{"type": "object"}', context(template, tokens), before) == expected


def test_template_with_channels_is_refused() -> None:
    with pytest.raises(RefusedError, match="writes replies in channels"):
        format_of("{}", context("<|start|>assistant<|channel|>"), "hi")


TEXTS = [
    ('{"a": "<think>"}', JsonFormat(), ('{"a": "<think>"}', "")),
    ('{"a": "<think>x</think>"}', JsonFormat(thought=TAGS), ('{"a": "<think>x</think>"}', "")),
    (' <think>\nso  so\n</think>\n\n{"a": "</think> "}', JsonFormat(thought=TAGS), ('{"a": "</think> "}', "so  so")),
    ("so\n</think>[1]", JsonFormat(thought=TAGS, in_thought=True), ("[1]", "so")),
    ("so <b </th", JsonFormat(thought=TAGS, in_thought=True), ("", "so <b </th")),
    ("<think>cut ", JsonFormat(thought=TAGS), ("", "cut")),
    ("<thi", JsonFormat(thought=TAGS), ("<thi", "")),
    ("</think>1", JsonFormat(thought=TAGS, in_thought=True), ("1", "")),
    ("", JsonFormat(thought=TAGS), ("", "")),
]


@pytest.mark.parametrize(("text", "form", "expected"), TEXTS)
def test_split_format_reads_tags_before_the_json_only(text: str, form: JsonFormat, expected: tuple[str, str]) -> None:
    assert split_format(text, form) == expected


@pytest.mark.parametrize(("text", "form", "expected"), TEXTS)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_streamed_parts_begin_the_texts_of_the_reply(
    text: str, form: JsonFormat, expected: tuple[str, str], size: int
) -> None:
    reader, found = FormatReader(form), {"content": "", "reasoning": ""}
    for place in range(0, len(text), size):
        for kind, part in reader.add(text[place : place + size]):
            found[kind] += part
    assert expected[0].startswith(found["content"])
    assert expected[1].startswith(found["reasoning"])
    for kind, part in reader.end():
        found[kind] += part
    assert (found["content"], found["reasoning"]) == expected


def test_requests_with_other_schemas_are_not_repetitions() -> None:
    async def digests() -> list[bytes]:
        session, request = OpenSession("s", "k", "o", {}, None, None), read(chat_completions).request
        schemas = (None, '{"type": "object"}', "{}", "{}")
        return [session.asked(replace(request, schema=schema)).digest for schema in schemas]

    first, second, third, again = asyncio.run(digests())
    assert len({first, second, third}) == 3
    assert again == third


def test_options_with_a_format_cross_processes_unchanged() -> None:
    options = SamplingOptions(5, keep_mask=True, format=JsonFormat("{}", TAGS, in_thought=True))
    assert pickle.loads(pickle.dumps(options)) == options
    assert hash(pickle.loads(pickle.dumps(options))) == hash(options)


def test_format_is_trained_only_with_recorded_sets() -> None:
    plain, form = SamplingOptions(5), JsonFormat()
    assert with_format(plain, None, trained=True) is plain
    assert with_format(plain, form, trained=False).format == form
    assert with_format(replace(plain, keep_mask=True), form, trained=True).format == form
    with pytest.raises(DataError, match="keep_sampling_mask=true; set it, or leave out the format"):
        with_format(plain, form, trained=True)
