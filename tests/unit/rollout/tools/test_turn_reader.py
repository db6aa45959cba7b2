"""Messages that are read while they are sampled, against the parser of whole messages."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.rollout.tools import turn_reader
from mcore_rl.rollout.tools.formats import FORMATS, NO_CALLS
from mcore_rl.rollout.tools.parsers import ToolCallParser, split_reasoning, text_reader
from mcore_rl.rollout.tools.turn_reader import TurnReader
from tests.unit.data.chat.made import LOOK
from tests.unit.rollout.counted_text import CountedText

CALLS = {
    "qwen3_coder": "<tool_call>\n<function=look>\n<parameter=q>\na\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>look\n<arg_key>q</arg_key>\n<arg_value>a</arg_value>\n</tool_call>",
    "deepseek": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{"q": "a"}<｜tool▁call▁end｜>',
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
    '{"q": "a"}<|tool_call_end|><|tool_calls_section_end|>',
    "mistral": '[TOOL_CALLS]look{"q": "a"}',
    "harmony": '<|start|>assistant<|channel|>commentary to=functions.look<|message|>{"q": "a"}<|call|>',
    "hermes": '<tool_call>\n{"name": "look", "arguments": {"q": "a"}}\n</tool_call>',
    "llama3": '\n{"name": "look", "parameters": {"q": "a"}}',
}
THOUGHTS = ("<think>", "</think>", "[THINK]", "<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant")
WORDS = st.sampled_from([" ", "\n", "\n   ", "\t \r\n  ", "\x1c", " \x1f ", "so", "<", "{", '"name"', "to=", *THOUGHTS])
BEGUN = ("", "so", "{", '{ "name"', "<think>", "<think>so", "<|channel|>analysis", "<|channel|>commentary", "<|end|>")


def streamed(reader: TurnReader, text: str, sizes: list[int]) -> dict[str, str]:
    """Read a text in pieces of the sizes, in turn."""
    found, place, number = {"content": "", "reasoning": ""}, 0, 0
    while place < len(text):
        size = sizes[number % len(sizes)]
        for kind, part in reader.add(text[place : place + size]):
            assert part
            found[kind] += part
        place, number = place + size, number + 1
    return found


@settings(max_examples=150, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", FORMATS)
def test_streamed_texts_begin_the_texts_of_the_message(name: str, data: st.DataObject) -> None:
    """For every way in which the message may end."""
    parts = data.draw(st.lists(st.one_of(WORDS, st.just(CALLS[name])), max_size=8))
    text = "".join(parts)
    text = text[: data.draw(st.integers(0, len(text)))]
    prompt = data.draw(st.sampled_from(["", "<think>\n", "<|channel|>analysis<|message|>"]))
    sizes = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    parser = ToolCallParser(name, None, [LOOK])
    reader = parser.reader(prompt)
    assert reader is not None
    found = streamed(reader, text, sizes)
    for message in (parser.parse(text, prompt), parser.parse_truncated(text, prompt)):
        assert message.content.startswith(found["content"])
        assert message.reasoning.startswith(found["reasoning"])
    found = streamed(text_reader(prompt), text, sizes)
    content, reasoning = split_reasoning(text, prompt)
    assert content.startswith(found["content"])
    assert reasoning.startswith(found["reasoning"])
    assert len(found["content"]) >= len(content.rstrip()) - len("<|channel|>analysis<|message|>")


@pytest.mark.parametrize("name", FORMATS)
def test_text_before_a_call_is_returned_at_once(name: str) -> None:
    reader = ToolCallParser(name, None, [LOOK]).reader()
    assert reader is not None
    assert reader.add("Let me see. ") == [("content", "Let me see.")]
    assert reader.add("Now") == [("content", " Now")]
    assert reader.add(f"\n{CALLS[name]} more") == []


def test_reasoning_is_returned_without_its_tags() -> None:
    reader = text_reader()
    texts = ("<thi", "nk>\nhm", ", ", "so</", "b></thi", "nk>\n\nyes", "!")
    parts = [part for text in texts for part in reader.add(text)]
    reasoning = [("reasoning", text) for text in ("hm", ",", " so", "</b>")]
    assert parts == [*reasoning, ("content", "yes"), ("content", "!")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\n a \n", ("\n a \n", "")),
        ("<think>hm</think>\n\na\n", ("a", "hm")),
        ("<think>\n</think>\n\na\n", ("a", "")),
        (" a <think>hm</think> b ", (" a  b", "hm")),
    ],
)
def test_white_space_stays_unless_reasoning_is_beside_it(text: str, expected: tuple[str, str]) -> None:
    assert split_reasoning(text) == expected
    found = streamed(text_reader(), text, [1])
    assert (found["content"], found["reasoning"]) == (expected[0].rstrip(), expected[1])


def test_calls_of_a_truncated_message_are_content() -> None:
    call = CALLS["hermes"]
    found = ToolCallParser("hermes", None, [LOOK]).parse_truncated(f"<think>a</think>see {call} {call[:30]}")
    assert (found.content, found.reasoning, found.calls) == (f"see {call} {call[:30]}", "a", ())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3", 'hi\n{SPACE"name": "look", "parameters": {"q": "a"}}'),
        ("harmony", "hi<|channel|>analysisSPACE<|message|>secret"),
        ("harmony", 'hi<|channel|>commentarySPACEto=functions.look<|message|>{"q": "a"}<|call|>'),
        ("harmony", "hi<|channel|>finalSPACE<|message|>"),
    ],
)
@pytest.mark.parametrize("space", ["\x1c", "\x1d", "\x1e", "\x1f", "\x1c\n\x1f", " \x1e "])
def test_separators_are_white_space_of_calls_and_tags(name: str, text: str, space: str) -> None:
    """U+001C to U+001F are white space for the parser of whole messages."""
    parser = ToolCallParser(name, None, [LOOK])
    text = text.replace("SPACE", space)
    for sizes in ([1], [len(text)]):
        reader = parser.reader("")
        assert reader is not None
        found, message = streamed(reader, text, sizes), parser.parse(text, "")
        assert (found["content"], found["reasoning"]) == ("hi", message.reasoning)
        assert message.content == "hi"


@settings(max_examples=80, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", FORMATS)
def test_parts_do_not_depend_on_the_cuts_of_the_message(name: str, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.one_of(WORDS, st.just(CALLS[name][:9])), max_size=20)))
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    for keeps in (False, True):
        whole, cut = (TurnReader(FORMATS[name], "", keeps_space=keeps) for _ in range(2))
        assert streamed(cut, text, sizes) == streamed(whole, text, [len(text) + 1])


COMPILED = turn_reader._compiled


class CountedPattern:
    """Pattern that counts the characters that are searched."""

    num_searched = 0

    def __init__(self, pattern: str) -> None:
        self._pattern = COMPILED(pattern)

    def search(self, text: str, place: int, *, partial: bool) -> Any:
        CountedPattern.num_searched += len(text) - place
        return self._pattern.search(text, place, partial=partial)


@pytest.mark.parametrize("name", [*FORMATS, "none"])
def test_a_character_is_read_a_limited_number_of_times(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_reader, "_compiled", CountedPattern)
    form = NO_CALLS if name == "none" else FORMATS[name]
    for begun in BEGUN:
        for unit in (" ", "\n", " \n", "\n ", "\x1c", "\x1d ", "a", "<", "{\n", "<think>", "</think> "):
            reader, text = TurnReader(form, "", keeps_space=False), begun + unit * (600 // len(unit))
            CountedText.reset()
            CountedPattern.num_searched = 0
            for character in text:
                reader.add(CountedText(character))
            assert CountedPattern.num_searched < 60 * len(text), (begun, unit)
            assert CountedText.num_copied < 10 * len(text), (begun, unit)
