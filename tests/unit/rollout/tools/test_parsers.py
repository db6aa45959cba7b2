"""Recognition of tool calls in every format."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.config.schema import TOOL_FORMATS
from mcore_rl.errors import ConfigError
from mcore_rl.rollout.tools.formats import FORMATS, format_of_template
from mcore_rl.rollout.tools.parsers import MalformedCall, ParsedMessage, ParserError, ToolCall, ToolCallParser

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {
            "type": "object",
            "properties": {
                "q": {"type": "string"},
                "n": {"type": "integer"},
                "deep": {"type": "object", "properties": {"x": {"type": ["number", "null"]}}},
            },
            "required": ["q"],
        },
    },
}
FIRST, SECOND = {"q": "a", "n": 2}, {"q": "b", "n": 3}
BAD = '{"q": "a", "n": }'
THOUGHT = "<think>\nhm\n</think>\n\n"
MESSAGE_FORMATS = (
    *("hermes", "qwen3_coder", "deepseek", "deepseek_v31", "kimi", "mistral", "mistral_args", "llama3", "glm45"),
)


def written(form: str, *calls: dict[str, Any] | str, name: str = "look") -> str:
    """Format calls as models write them; a string stands for arguments that are written unchanged."""
    texts = [call if isinstance(call, str) else json.dumps(call, ensure_ascii=False) for call in calls]
    match form:
        case "hermes":
            object_ = '{{"name": "{}", "arguments": {}}}'
            return "\n".join(f"<tool_call>\n{object_.format(name, text)}\n</tool_call>" for text in texts)
        case "llama3":
            return "; ".join(f'{{"name": "{name}", "parameters": {text}}}' for text in texts)
        case "mistral":
            return "".join(f"[TOOL_CALLS]{name}{text}" for text in texts)
        case "mistral_args":
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{text}" for text in texts)
        case "mistral_list":
            return "[TOOL_CALLS] [" + ", ".join(f'{{"name": "{name}", "arguments": {text}}}' for text in texts) + "]"
        case "kimi":
            one = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
            calls_ = "".join(one.format(name, number, text) for number, text in enumerate(texts))
            return f"<|tool_calls_section_begin|>{calls_}<|tool_calls_section_end|>"
        case "deepseek":
            one = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
        case "deepseek_v31":
            one = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        case _:
            return "\n".join(xml(form, name, call) for call in calls)
    return "<｜tool▁calls▁begin｜>" + "\n".join(one.format(name, text) for text in texts) + "<｜tool▁calls▁end｜>"


def xml(form: str, name: str, arguments: Any) -> str:
    pairs = {k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in arguments.items()}
    if form == "glm45":
        body = "\n".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>" for k, v in pairs.items())
        return f"<tool_call>{name}\n{body}\n</tool_call>"
    body = "\n".join(f"<parameter={k}>\n{v}\n</parameter>" for k, v in pairs.items())
    return f"<tool_call>\n<function={name}>\n{body}\n</function>\n</tool_call>"


def parser(form: str) -> ToolCallParser:
    return ToolCallParser(next(name for name in FORMATS if form.startswith(name)), None, [LOOK])


def calls_of(message: ParsedMessage) -> list[dict[str, Any]]:
    return [call.arguments for call in message.calls if isinstance(call, ToolCall)]


def reasons_of(message: ParsedMessage) -> list[str]:
    return [call.reason for call in message.calls if isinstance(call, MalformedCall)]


def test_formats_equal_the_choices_of_the_key() -> None:
    assert set(TOOL_FORMATS) == set(FORMATS)


@pytest.mark.parametrize("form", [*MESSAGE_FORMATS, "mistral_list"])
def test_parse_one_and_two_calls_with_text(form: str) -> None:
    read = parser(form).parse
    own_id = "functions.look:0" if form == "kimi" else ""
    assert read(written(form, FIRST)) == ParsedMessage("", "", (ToolCall("look", FIRST, own_id),))
    assert calls_of(read(written(form, FIRST, SECOND))) == [FIRST, SECOND]
    around = read(f"<think>\nhm\n</think>\n\nLet me look.\n{written(form, FIRST)}\nDone.")
    assert calls_of(around) == [FIRST]
    assert around.reasoning == "hm"
    assert around.content.split() == ["Let", "me", "look.", "Done."]


@pytest.mark.parametrize("form", [*MESSAGE_FORMATS, "mistral_list"])
def test_parse_call_inside_reasoning_is_ignored(form: str) -> None:
    thought = f"\nmaybe {written(form, FIRST)}\nor\n{written(form, FIRST)}\n"
    opened = parser(form).parse(f"<think>{thought}</think>\n\nNo call.")
    by_prompt = parser(form).parse(f"{thought}</think>\n\nNo call.", prompt="user\nhello\nassistant\n<think>\n")
    never_closed = parser(form).parse(f"<think>{thought}")
    assert opened == by_prompt
    assert (opened.content, opened.calls) == ("No call.", ())
    assert opened.reasoning == thought.strip()
    assert (never_closed.content, never_closed.calls) == ("", ())
    # The prompt has closed the reasoning again, as templates do that disable reasoning.
    assert calls_of(parser(form).parse(written(form, FIRST), prompt="<think>\n\n</think>\n\n")) == [FIRST]


@pytest.mark.parametrize("form", ["hermes", "deepseek", "deepseek_v31", "kimi", "mistral", "mistral_list", "llama3"])
def test_parse_bad_json_is_malformed(form: str) -> None:
    message = parser(form).parse(written(form, BAD))
    assert (calls_of(message), message.content) == ([], "")
    assert "not valid JSON" in reasons_of(message)[0]
    for arguments in ("[1]", '"q"', '{"q": "a", "n": NaN}', "[" * 100_000):
        assert calls_of(parser(form).parse(written(form, arguments))) == []


@pytest.mark.parametrize("form", ["qwen3_coder", "glm45"])
def test_parse_bad_xml_is_malformed(form: str) -> None:
    whole = written(form, FIRST)
    for tag in ("</parameter>", "</function>", "</arg_key>", "</arg_value>", "<arg_value>", "<parameter=n>"):
        if tag in whole:
            broken = parser(form).parse(whole.replace(tag, "", 1))
            assert (calls_of(broken), len(reasons_of(broken))) == ([], 1), tag
    twice = whole.replace("<parameter=n>", "<parameter=q>").replace("<arg_key>n", "<arg_key>q")
    assert reasons_of(parser(form).parse(twice)) == ["argument q is given twice"]


@pytest.mark.parametrize("form", MESSAGE_FORMATS)
def test_parse_good_and_bad_calls_keep_their_order(form: str) -> None:
    bad = {"n": 1} if form in ("qwen3_coder", "glm45") else '{"n": 1}'
    message = parser(form).parse(written(form, FIRST, bad, SECOND))
    assert [type(call) for call in message.calls] == [ToolCall, MalformedCall, ToolCall]
    assert "'q' is a required property" in reasons_of(message)[0]


@pytest.mark.parametrize("form", MESSAGE_FORMATS)
def test_parse_unknown_tool_or_argument_is_malformed(form: str) -> None:
    read = parser(form).parse
    unknown = read(written(form, FIRST, name="nope")).calls[0]
    assert isinstance(unknown, MalformedCall)
    assert unknown.answer == ("Error: The call of nope was not executed: there is no such tool; the tools are: look.")
    assert reasons_of(read(written(form, {"q": "a", "n": "many"}))) == ["argument n: 'many' is not of type 'integer'"]
    assert reasons_of(read(written(form, {"q": "a", "z": 1}))) == [
        "there is no argument 'z'; the arguments are: q, n, deep"
    ]


@pytest.mark.parametrize("form", MESSAGE_FORMATS)
def test_parse_textual_arguments_get_schema_types(form: str) -> None:
    """In formats with textual arguments, a string that looks like a number stays a string, and code keeps its
    indentation."""
    arguments = {"q": "  007\n\treturn 'ä' \n", "n": -3, "deep": {"x": None}}
    assert calls_of(parser(form).parse(written(form, arguments))) == [arguments]


def test_parse_python_literals_are_converted() -> None:
    tool = json.loads(json.dumps(LOOK).replace('"integer"', '"boolean"'))
    text = written("qwen3_coder", {"q": "None", "n": True}).replace("true", "True")
    assert calls_of(ToolCallParser("qwen3_coder", None, [tool]).parse(text)) == [{"q": "None", "n": True}]


@pytest.mark.parametrize("form", [*MESSAGE_FORMATS, "mistral_list"])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_parse_prefix_has_no_additional_call(form: str, data: st.DataObject) -> None:
    text = st.text(st.characters(codec="utf-8", exclude_characters="<>[]{}｜\r"), max_size=12)
    arguments = st.fixed_dictionaries({"q": text}, optional={"n": st.integers(), "deep": st.fixed_dictionaries({})})
    calls = data.draw(st.lists(arguments, min_size=1, max_size=3))
    before = data.draw(st.sampled_from(["", "Well.\n", THOUGHT, THOUGHT + "Well.\n"]))
    whole = before + written(form, *calls)
    read = parser(form).parse
    assert calls_of(read(whole)) == calls
    for end in data.draw(st.lists(st.integers(0, len(whole)), max_size=6)):
        part = calls_of(read(whole[:end]))
        assert part == calls[: len(part)]


@pytest.mark.parametrize("form", MESSAGE_FORMATS)
def test_parse_truncated_message_has_no_call(form: str) -> None:
    whole = re.sub(r"(<｜tool▁calls▁end｜>|<\|tool_calls_section_end\|>)$", "", written(form, FIRST))
    for end in range(len(whole)):
        assert calls_of(parser(form).parse(whole[:end])) == [], whole[:end]


ENDS = {
    "hermes": "</tool_call>",
    "qwen3_coder": "</tool_call>\n</function>\n<tool_call>",
    "deepseek": "<｜tool▁call▁end｜>\n```\n<｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁call▁end｜>",
    "kimi": "<|tool_call_end|><|tool_calls_section_end|>",
    "mistral": "[TOOL_CALLS]look{}[ARGS]",
    "mistral_args": "[TOOL_CALLS]look[ARGS]{}",
    "mistral_list": "]} [TOOL_CALLS]",
    "llama3": '<|python_tag|>\n{"name": "look", "parameters": {}}; ',
    "glm45": "</tool_call>\n<tool_call>look",
}


@pytest.mark.parametrize("form", ENDS)
@pytest.mark.parametrize("around", ["{}", "use {} twice: {}", "<think>{}</think>", "{{}}{}"])
def test_parse_end_tag_inside_a_string_is_text(form: str, around: str) -> None:
    arguments = {"q": around.replace("{}", ENDS[form]), "n": 2}
    message = parser(form).parse(f"Well.\n{written(form, arguments, SECOND)}\nDone.")
    assert calls_of(message) == [arguments, SECOND]
    assert (message.content.split(), message.reasoning) == (["Well.", "Done."], "")


def test_parse_argument_tags_inside_values_are_text() -> None:
    for form, inner in (("qwen3_coder", "a</parameter> b"), ("glm45", "a</arg_value> b</arg_key>")):
        assert calls_of(parser(form).parse(written(form, {"q": inner, "n": 1}))) == [{"q": inner, "n": 1}]


WRITTEN_OTHERWISE = [
    '{"type": "function", "name": "look", "parameters": ARGS}',
    '{"name": "look", "type": "function", "parameters": ARGS}',
    '{"parameters": ARGS, "name": "look"}',
    '{"name": "look", "arguments": ARGS}',
    '{"type": "function", "function": {"name": "look", "arguments": ARGS}}',
    '{"type": "function", "function": "look", "parameters": ARGS}',
    '{"name": "look", "parameters": "{\\"q\\": \\"a\\", \\"n\\": 2}"}',
]


@pytest.mark.parametrize("form", ["hermes", "llama3", "mistral", "kimi", "deepseek", "deepseek_v31"])
@pytest.mark.parametrize(
    ("bad", "reason"), [(r'"\ud800"', r"\ud800 is half of a character"), ("1e999", "beyond the range")]
)
def test_parse_lone_surrogate_is_malformed(form: str, bad: str, reason: str) -> None:
    whole = r'{"q": "\ud83d\ude00"}'
    message = parser(form).parse(f'{written(form, whole)}\n{written(form, f"""{{"q": {bad}}}""")}')
    assert calls_of(message) == [{"q": "\U0001f600"}]
    assert [reason in each for each in reasons_of(message)] == [True]


def test_parse_llama_call_after_other_json_is_kept() -> None:
    message = parser("llama3").parse(written("llama3", "null", '"x"', '{"q": "a"}'))
    assert (calls_of(message), len(reasons_of(message))) == ([{"q": "a"}], 2)


@pytest.mark.parametrize("text", WRITTEN_OTHERWISE)
@pytest.mark.parametrize("form", ["llama3", "hermes", "mistral_list"])
def test_parse_alternative_keys_are_accepted(form: str, text: str) -> None:
    body = text.replace("ARGS", json.dumps(FIRST))
    whole = {"llama3": body, "hermes": f"<tool_call>{body}</tool_call>", "mistral_list": f"[TOOL_CALLS][{body}]"}[form]
    assert calls_of(parser(form).parse(f"Well.\n{whole}")) == [FIRST]
    if form == "llama3":
        assert calls_of(parser(form).parse(f"<|python_tag|>{body}; {body}")) == [FIRST, FIRST]


def test_parse_json_text_arguments_and_several_calls() -> None:
    text = json.dumps(json.dumps(FIRST))
    for form in ("hermes", "deepseek", "deepseek_v31", "kimi", "llama3", "mistral_list"):
        assert calls_of(parser(form).parse(written(form, text))) == [FIRST], form
    one, two = (json.dumps({"name": "look", "arguments": each}) for each in (FIRST, SECOND))
    for block in (f"{one}\n{two}", f"[{one}, {two}]"):
        assert calls_of(parser("hermes").parse(f"<tool_call>\n{block}\n</tool_call>")) == [FIRST, SECOND]


def test_parse_mistral_call_ids_are_kept() -> None:
    for text in (
        f"[TOOL_CALLS]look[CALL_ID]abcdef123[ARGS]{json.dumps(FIRST)}",
        f"[TOOL_CALLS] [{json.dumps({'name': 'look', 'arguments': FIRST, 'id': 'abcdef123'})}]",
    ):
        assert parser("mistral").parse(text).calls == (ToolCall("look", FIRST, "abcdef123"),)


@pytest.mark.parametrize("form", [*MESSAGE_FORMATS, "mistral_list"])
def test_parse_malformed_call_keeps_text_and_arguments(form: str) -> None:
    whole = re.sub(r"<[｜|]tool.calls.(section.)?(begin|end)[｜|]>", "", written(form, {"q": "a", "z": 1}))
    (call,) = parser(form).parse(whole).calls
    assert isinstance(call, MalformedCall)
    z = "1" if form in ("qwen3_coder", "glm45") else 1
    assert (call.text, call.arguments) == (whole, {"q": "a", "z": z})


HARMONY_THOUGHT = "<|channel|>analysis<|message|>hm to=functions.look<|message|>{}<|end|><|start|>assistant"
HARMONY_CALL = "<|channel|>commentary to=functions.look <|constrain|>json<|message|>"


@pytest.mark.parametrize("end", ["", "<|call|>"])
@pytest.mark.parametrize("head", [HARMONY_CALL, " to=functions.look<|channel|>commentary json<|message|>"])
def test_parse_harmony_channels_are_reasoning_content_and_call(head: str, end: str) -> None:
    """A call ends the generation; its end token is not in the text, or is written by a template."""
    preamble = "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant"
    text = f"{HARMONY_THOUGHT}{preamble}{head}{json.dumps(FIRST)}{end}"
    message = parser("harmony").parse(text, prompt="<|start|>assistant")
    assert message == ParsedMessage("Let me look.", "hm to=functions.look<|message|>{}", (ToolCall("look", FIRST),))
    final = parser("harmony").parse(f"{HARMONY_THOUGHT}<|channel|>final<|message|>Done: <think> is text.<|return|>")
    assert (final.content, final.calls) == ("Done: <think> is text.", ())


def test_parse_harmony_call_that_is_cut_or_malformed_has_no_arguments() -> None:
    whole = HARMONY_THOUGHT + HARMONY_CALL + json.dumps(FIRST)
    for end in range(len(whole)):
        assert calls_of(parser("harmony").parse(whole[:end])) == [], whole[:end]
    for text, reason in (
        (HARMONY_CALL + BAD, "not valid JSON"),
        (HARMONY_CALL + "[1]", 'no JSON object "arguments"'),
        ("<|channel|>commentary to=functions <|message|>{}", "not to=functions.NAME"),
        (HARMONY_CALL.replace("look", "nope") + "{}", "no such tool"),
        (HARMONY_CALL + '{"n": 1}', "'q' is a required property"),
    ):
        message = parser("harmony").parse(text)
        assert (calls_of(message), len(message.calls)) == ([], 1)
        assert reason in reasons_of(message)[0]


def test_parse_invalid_kimi_id_is_malformed() -> None:
    one = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    for wrong in ("look", "functions.look", ":0", "functions.[EOS]look:0", "functions.look:0:x", "look 1:0"):
        message = parser("kimi").parse(one.format(wrong))
        assert calls_of(message) == []
        assert "functions.NAME:NUMBER" in reasons_of(message)[0]
    for name in ("lok", "look"):  # an unknown tool, and a tool that requires an argument
        (call,) = parser("kimi").parse(one.format(f"functions.{name}:3")).calls
        assert (type(call), call.name, call.id) == (MalformedCall, name, f"functions.{name}:3")


def test_parse_llama_json_in_prose_is_no_call() -> None:
    for text in ('He is {"name": "Bob", "age": 3}.', '{"name": "Bob", "age": 3}', '{"name": "look"}'):
        assert parser("llama3").parse(text) == ParsedMessage(text, "", ())
    inner = '{"name": "look", "parameters": {"q": "{\\"name\\": \\"look\\", \\"parameters\\": {}}"}}'
    assert calls_of(parser("llama3").parse(f"<|python_tag|>{inner}")) == [{"q": '{"name": "look", "parameters": {}}'}]


def test_parse_many_stretches_reach_the_limit() -> None:
    message = parser("llama3").parse(("x\n" + written("llama3", FIRST) + "\n") * 500)
    assert 0 < len(message.calls) < 500


TEMPLATES = {
    "hermes": '\'<tool_call>\\n{"name": "\' + tool_call.name + \'", "arguments": \'',
    "qwen3_coder": "{{- '<tool_call>\\n<function=' + tool_call.name + '>\\n' }} \"name\" \"arguments\"",
    "glm45": "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>",
    "deepseek": "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>'",
    "kimi": "{{ tool_call['id'] }}<|tool_call_argument_begin|>{{ tool_call['function']['arguments'] | tojson }}",
    "mistral": '"[TOOL_CALLS]" + tool_call["function"]["name"]',
    "harmony": '{{- "functions." + tool_call.name + "<|channel|>commentary " }}{{- "json<|message|>" }}',
    "llama3": "'<|start_header_id|>' ... {{- '{\"name\": \"' + tool_call.name + '\", ' }}{{- '\"parameters\": ' }}",
    None: "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}{% endfor %}",
}


@pytest.mark.parametrize("form", TEMPLATES, ids=str)
def test_parser_auto_follows_the_chat_template(form: str | None) -> None:
    assert format_of_template(TEMPLATES[form]) == form


@pytest.mark.parametrize("template", [None, TEMPLATES[None]])
def test_parser_unknown_template_names_the_key(template: str | None) -> None:
    with pytest.raises(ConfigError, match=r"rollout.tool_parser=auto.*set rollout.tool_parser to one of .*hermes"):
        ToolCallParser("auto", template, [LOOK])


USERS = """
from mcore_rl.rollout.tools.parsers import ParsedMessage, ToolCall

def brackets(text, tools):
    name, _, query = text.strip("[]").partition(" ")
    return ParsedMessage("", "", (ToolCall(name, {"q": query}),))

def broken(text, tools):
    return tools[7]

def other(text, tools):
    return {"calls": []}
"""


def test_parser_user_function_is_checked_against_schemas(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(USERS)
    mine = ToolCallParser(f"{file}:brackets", None, [LOOK])
    assert calls_of(mine.parse("[look here]")) == [{"q": "here"}]
    assert "there is no such tool" in reasons_of(mine.parse("[nope here]"))[0]
    with pytest.raises(ParserError, match="broken raised IndexError"):
        ToolCallParser(f"{file}:broken", None, [LOOK]).parse("x")
    with pytest.raises(ParserError, match="must return a ParsedMessage"):
        ToolCallParser(f"{file}:other", None, [LOOK]).parse("x")
