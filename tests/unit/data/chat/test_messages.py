"""Messages in the formats of published data sets, rendered by different kinds of chat templates."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mcore_rl.config.schema import DataConfig
from mcore_rl.data.chat.messages import chat_messages
from mcore_rl.data.templates import PromptRenderer
from mcore_rl.errors import ConfigError, DataError
from tests.unit.data.chat import made

ARGUMENTS = {"q": 'é "it"', "deep": {"unit": None}}
WHOLE = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": ARGUMENTS}}
TEXT = json.dumps(ARGUMENTS)
CALLS: list[dict[str, Any]] = [
    WHOLE,
    {**WHOLE, "function": {"name": "look", "arguments": TEXT}},
    {**WHOLE, "function": {"name": "look", "arguments": json.dumps(TEXT)}},
    {"function": {"name": "look", "arguments": TEXT}},
    {"name": "look", "arguments": ARGUMENTS},
    {"id": None, "type": None, "function": {"name": "look", "parameters": ARGUMENTS}},
    {**WHOLE, "function": {"name": "look", "arguments": list(ARGUMENTS.items())}},
    {**WHOLE, "function": {"name": "look", "arguments": list(map(list, ARGUMENTS.items()))}},
]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, *calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content} | ({"tool_calls": list(calls)} if calls else {})


def tool(content: str, **keys: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, **keys}


@pytest.fixture(autouse=True)
def without_child_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Render in this process; test_limits.py tests the child."""
    monkeypatch.setattr("mcore_rl.data.templates.render_all", lambda jobs: (job() for job in jobs))


def shown(template: str | None, messages: Any, **data: Any) -> tuple[str, list[dict[str, Any]], set[str]]:
    """Return the rendered text, the messages that the run keeps, and the notes."""
    renderer = PromptRenderer(made.tokenizer(template), DataConfig(**data))
    canonical = renderer.canonical(chat_messages(messages, "file, row 3"), "file, row 3")
    (text,) = renderer.render_all([(canonical, "file, row 3")])
    return text, canonical, set(renderer.take_notes())


def oracle(template: str, messages: Any, **options: Any) -> str:
    return str(made.tokenizer(template).apply_chat_template(messages, tokenize=False, **options))


@pytest.mark.parametrize("call", CALLS, ids=range(len(CALLS)))
def test_messages_tool_call_forms_are_normalized(call: dict[str, Any]) -> None:
    _, canonical, _ = shown(made.STABLE, [user("?"), assistant(None, call), tool("42")])
    assert canonical[1:] == [assistant("", WHOLE), tool("42", tool_call_id="call00000")]


@pytest.mark.parametrize("template", [made.STABLE, made.TEXT_ARGUMENTS, made.CALLS_ONLY_IF_NULL, made.NO_NULLS])
def test_messages_tool_call_is_rendered_for_template(template: str) -> None:
    text = shown(template, [user("?"), assistant(None, WHOLE), tool("42")])[0]
    by_hand = json.loads(json.dumps(WHOLE))
    if template == made.TEXT_ARGUMENTS:
        by_hand["function"]["arguments"] = json.dumps(ARGUMENTS, ensure_ascii=False)
    content = None if template == made.CALLS_ONLY_IF_NULL else ""
    expected = [user("?"), assistant(content, by_hand), tool("42", tool_call_id="call00000")]
    assert text == oracle(template, expected, add_generation_prompt=True)


def test_messages_struct_nulls_are_removed_json_nulls_kept() -> None:
    call = {**WHOLE, "function": {"name": "look", "arguments": {"q": "a", "n": None}, "description": None}}
    parts = [{"type": "text", "text": "hi", "image_url": None}]
    rows = [user(parts), assistant(None, call), {**tool("42"), "tool_calls": None, "name": None}]
    for struct_nulls, arguments in ((True, {"q": "a"}), (False, {"q": "a", "n": None})):
        first, second, third = chat_messages(rows, "row", struct_nulls=struct_nulls)
        assert first == user("hi")
        assert second["tool_calls"] == [{**WHOLE, "function": {"name": "look", "arguments": arguments}}]
        assert third == tool("42")


@pytest.mark.parametrize(
    ("template", "joined"),
    [(made.STABLE, "one\ntwo"), (made.PARTS_ONLY, "onetwo"), (made.STRINGS_OR_PARTS, "one|two"), (None, "one\ntwo")],
)
def test_messages_text_parts_are_rendered_by_all_templates(template: str | None, joined: str) -> None:
    text, canonical, _ = shown(template, [user([{"type": "text", "text": "one"}, {"text": "two"}])])
    assert joined in text
    assert canonical == [user(joined)]
    assert "one" in shown(template, [user([{"type": "text", "text": "one"}])])[0]


def test_messages_developer_role_falls_back_to_system() -> None:
    messages = [{"role": "developer", "content": "Be brief."}, user("?")]
    as_system = [{"role": "system", "content": "Be brief."}, user("?")]
    text, canonical, notes = shown(made.KNOWN_ROLES, messages)
    assert text == oracle(made.KNOWN_ROLES, as_system, add_generation_prompt=True)
    assert canonical == as_system
    assert "developer message, rendered as a system message" in next(iter(notes))
    text, canonical, notes = shown(made.STABLE, messages)
    assert (text, canonical, notes) == (oracle(made.STABLE, messages, add_generation_prompt=True), messages, set())


def test_messages_call_ids_are_completed_and_match_answers() -> None:
    second = {**WHOLE, "id": "abc-1234567"}
    rows = [user("?"), assistant("", {"name": "a"}, second), tool("1", name="a"), tool("2", tool_call_id="abc-1234567")]
    for template, ids in (
        (made.STABLE, ["call00000", "abc-1234567"]),
        (made.SHORT_IDS, ["call00000", "call00001"]),
        (made.NAMED_CALLS, ["functions.a:0", "functions.look:1"]),
    ):
        _, canonical, _ = shown(template, rows)
        assert [call["id"] for call in canonical[1]["tool_calls"]] == ids
        assert [message["tool_call_id"] for message in canonical[2:]] == ids
    named_by_answer = [user("?"), assistant("", {"name": "a"}), tool("1", tool_call_id="xyz")]
    assert shown(made.STABLE, named_by_answer)[1][1]["tool_calls"][0]["id"] == "xyz"


PREFILLS = ["The answer is", "The answer is ", "<think>\nhm\n</think>\n\nSo", "{"]


@pytest.mark.parametrize("begun", PREFILLS)
@pytest.mark.parametrize("template", [made.STABLE, made.PARTS_ONLY, made.THINKS])
def test_messages_last_assistant_message_stays_open(template: str, begun: str) -> None:
    messages = [user("?"), assistant(begun)]
    text, canonical, _ = shown(template, messages)
    if template == made.PARTS_ONLY:
        messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    assert text == oracle(template, messages, continue_final_message=True)
    assert text.endswith(f"<|im_start|>assistant\n{begun}")
    assert canonical[-1]["content"] == begun


def test_messages_empty_or_reasoning_prefill_continues_turn() -> None:
    opened = shown(made.THINKS, [user("?"), assistant("<think>\nLet me")])[0]
    assert opened.endswith("<|im_start|>assistant\n<think>\nLet me")
    assert shown(made.STABLE, [user("?"), assistant("")])[0].endswith("?<|im_end|>\n<|im_start|>assistant\n")
    assert shown(None, [user("?"), assistant("So ")], plain_template="Q: {prompt}\nA: ")[0] == "Q: ?\nA: So "


@pytest.mark.parametrize(
    ("template", "messages", "problem"),
    [
        (made.HIDES_TOOLS.replace("{{ m.content }}", ""), [user("hi")], r"message 1 \(role 'user'\): 'hi' is not in"),
        (made.STABLE.replace("m.content }}", "m.content | upper }}"), [user("hi")], "drops or changes message 1"),
        (made.STABLE.replace("m.content }}", "m.content[:5] }}"), [user("a longer text")], "'a longer text' is not in"),
        (made.ONE_OF_EQUAL, [user("hi"), user("hi"), assistant("yo"), user("?")], "message 2"),
        (made.KNOWN_ROLES.replace("'developer'", "'critic'"), [user("a note"), {**user("no"), "role": "critic"}], "2"),
        (made.STABLE.replace(made._CALLS, ""), [user("?"), assistant("", WHOLE), tool("42")], "'look' is not in"),
        (made.STABLE, [user("?"), assistant("", WHOLE), tool("42", tool_call_id="x")], "message 3 answers tool call"),
        (made.STABLE, [user("?"), assistant("", WHOLE), tool("42"), tool("43")], "message 4 answers tool call None"),
        (made.STABLE, [user("?"), assistant("", WHOLE)], "tool call without an answer"),
        (made.STABLE, [user([{"type": "image_url", "image_url": "x"}])], "message 1 .user. has a part of type 'image"),
        (made.STABLE, [user("?"), assistant(None)], "message 2 .assistant. has no `content`"),
        (made.STABLE, [user({"a": 1})], "content of type dict"),
        (made.STABLE, [user("?"), assistant("", {"function": {"arguments": {}}})], "tool call 1 has no `function`"),
        (made.STABLE, [user("?"), assistant("", {"name": "a", "arguments": "{"})], "arguments of a is not valid JSON"),
        (made.STABLE, [user("?"), assistant("", {"name": "a", "arguments": [1]})], "arguments of a are list"),
        (made.STABLE, [user("?"), assistant("", {**WHOLE, "type": "custom"})], "of type 'custom'"),
        (made.STABLE, [{**user("?"), "tool_calls": [WHOLE]}], "only messages with the role 'assistant' may have them"),
        (made.STABLE, [user("?"), {**assistant("", WHOLE), "function_call": WHOLE["function"]}], "both tool_calls and"),
        (made.STABLE, [user("?"), {**assistant("a"), "thinking": 5}, user("?")], "thinking is of type int"),
        (made.STABLE, [{"role": " ", "content": "a"}], "no `role`"),
        (made.STABLE, [user("?"), "hi"], "message 2 is of type str"),
        (made.STABLE, [user("?"), {"role": 3, "content": "x"}], "message 2 has a role of type int"),
    ],
)
def test_messages_dropped_message_names_its_row(template: str, messages: Any, problem: str) -> None:
    with pytest.raises(DataError, match=rf"^file, row 3.*{problem}"):
        shown(template, messages)


@pytest.mark.parametrize("calls", [{}, {"tool_calls": []}, {"tool_calls": None}])
def test_messages_former_call_format_is_converted(calls: dict[str, Any]) -> None:
    expected = shown(made.STABLE, [user("?"), assistant("", WHOLE), tool("42")])
    single = {"name": "look", "arguments": TEXT}
    for call in (single, json.dumps(single)):
        rows = [user("?"), assistant(None) | calls | {"function_call": call}, {**tool("42"), "role": "function"}]
        assert shown(made.STABLE, rows)[:2] == expected[:2]


def test_messages_reasoning_that_no_template_reads_is_reported() -> None:
    for name in ("reasoning", "thinking"):
        _, _, notes = shown(made.STABLE, [user("?"), {**assistant("a"), name: "hidden"}, user("?")])
        assert any("have reasoning in earlier assistant messages" in note for note in notes)


@pytest.mark.parametrize("answer", [' 7 "a"\n', "{'x': 1}", "ä\\n", "/no_think do it"])
def test_presence_trimmed_or_json_texts_are_found(answer: str) -> None:
    as_json = made.STABLE.replace("{{ m.content }}", "{{ m.content | trim | tojson }}")
    assert shown(as_json, [user(answer), assistant("yo"), user("hi"), assistant("yo"), user("hi")])[2] == set()
    switched = made.STABLE.replace("{{ m.content }}", "{{ m.content | replace('/no_think', '') }}")
    assert shown(switched, [user(answer)])[2] == set()


def test_presence_dropped_reasoning_is_noted() -> None:
    messages = [user("?"), assistant("<think>hm</think>2"), user("sure?")]
    text, _, notes = shown(made.THINKS, messages)
    assert "hm" not in text
    assert next(iter(notes)).startswith("have reasoning in earlier assistant messages")
    assert shown(made.STABLE, messages)[2] == set()


def test_template_arguments_unknown_names_are_rejected() -> None:
    text, _, _ = shown(made.THINKS, [user("?")], template_kwargs={"enable_thinking": False})
    assert text == oracle(made.THINKS, [user("?")], add_generation_prompt=True, enable_thinking=False)
    assert text.endswith("<think></think>")
    for template, kwargs, problem in (
        (made.THINKS, {"thinking": True}, r"template_kwargs\.thinking has no effect: .* reads enable_thinking"),
        (made.STABLE, {"enable_thinking": True}, "it reads none"),
        (made.THINKS, {"tools": []}, r"template_kwargs\.tools is set by the trainer"),
        (None, {"enable_thinking": True}, r"data\.template_kwargs has no effect: .*plain_template"),
    ):
        with pytest.raises(ConfigError, match=problem):
            shown(template, [user("?")], template_kwargs=kwargs)


def test_template_variables_are_undefined_names() -> None:
    source = (
        "{% set x = x if x is defined else 1 %}{% set y = 2 %}{{ y }}{% for m in messages %}{% if m.z %}{% continue %}"
        "{% endif %}{% endfor %}{% generation %}{{ strftime_now('%d') }}{{ kind | default('a') }}{% endgeneration %}"
    )
    from mcore_rl.data.templates import variables

    assert variables(source) == {"x", "messages", "kind"}


def test_style_invalid_jinja_names_line() -> None:
    with pytest.raises(
        ConfigError, match=r"^model\.tokenizer_path: .* not valid Jinja: line 2: .*; correct it, or set"
    ):
        shown("a\n{% for %}", [user("?")])
