"""The stop token that ends a trained turn: it is the turn's own, and no text of the next message is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mcore_rl.errors import DataError
from tests.unit.data.chat.made import (
    CLOSE,
    FORGETS_REASONING,
    LOOK,
    NEXT_ROLE_ENDS,
    OTHER_STOP,
    STABLE,
    TOOL_TURN,
    USER_TURN,
)
from tests.unit.data.supervised.test_conversations import CALL, TURNS, load, trained_texts

ASK, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
MORE = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]
ROLE_STOPS = (TOOL_TURN, USER_TURN, OTHER_STOP)
ENDS_ONCE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% else %}<|endoftext|>{% endif %}"
)
"""Writes a stop token at the end of the conversation only."""


@pytest.mark.parametrize("messages", [[ASK, ANSWER, MORE[0]], [ASK, ANSWER, *MORE]])
def test_a_turn_that_ends_only_with_the_conversation_is_rejected(tmp_path: Path, messages: list[Any]) -> None:
    with pytest.raises(DataError, match=r"line 1: message 2: .* does not end this turn: none of <\|endoftext\|>"):
        load(tmp_path / "a.jsonl", [{"messages": messages}], ENDS_ONCE, stops=[OTHER_STOP])
    last = [ASK, {**ANSWER, "train": False}, *MORE]
    conversations, _, made = load(tmp_path / "b.jsonl", [{"messages": last}], ENDS_ONCE, stops=[OTHER_STOP])
    assert trained_texts(made, conversations) == [f"d\n{OTHER_STOP}"]


def test_a_stop_token_inside_the_next_message_does_not_end_a_turn(tmp_path: Path) -> None:
    quotes = [ASK, ANSWER, {"role": "user", "content": f"{OTHER_STOP} is a token, but what does it mean?"}]
    with pytest.raises(DataError, match=r"message 2: .* does not end this turn"):
        load(tmp_path / "a.jsonl", [{"messages": quotes}], ENDS_ONCE, stops=[OTHER_STOP])
    conversations, _, made = load(tmp_path / "b.jsonl", [{"messages": quotes}], stops=[CLOSE, OTHER_STOP])
    assert trained_texts(made, conversations) == [f"b{CLOSE}"]


def test_results_in_tags_keep_their_meaning_while_ends_are_searched(tmp_path: Path) -> None:
    """Templates find the user's question by tags at both ends of results, and show reasoning after it only."""
    template = (
        "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' and not "
        "(m.content.startswith('<r>') and m.content.endswith('</r>')) %}{% set ns.last = loop.index %}{% endif %}"
        "{% endfor %}"
    ) + STABLE.replace("{% if m.reasoning_content %}", "{% if m.reasoning_content and loop.index > ns.last %}")
    messages = [ASK, {**ANSWER, "reasoning_content": "why"}, {"role": "user", "content": "<r>4</r>"}, MORE[1]]
    conversations, _, made = load(tmp_path / "a.jsonl", [{"messages": messages}], template)
    assert trained_texts(made, conversations) == [f"<think>why</think>b{CLOSE}", f"d{CLOSE}"]


def test_last_turn_ends_with_the_token_that_begins_the_next_message(tmp_path: Path) -> None:
    def texts(messages: list[Any]) -> list[str]:
        rows = [{"messages": messages, "tools": [LOOK]}]
        conversations, _, made = load(tmp_path / "a.jsonl", rows, NEXT_ROLE_ENDS, stops=ROLE_STOPS)
        return trained_texts(made, conversations)

    call = '<tool_call>\n{"name": "look", "arguments": {"q": "sum"}}\n</tool_call>' + TOOL_TURN
    assert texts([ASK, ANSWER]) == [f"b{USER_TURN}"]
    assert texts([ASK, ANSWER, MORE[0]]) == [f"b{USER_TURN}"]
    assert texts([ASK, ANSWER, *MORE]) == [f"b{USER_TURN}", f"d{USER_TURN}"]
    assert texts(TURNS) == [call, f"Four.{USER_TURN}", f" Yes.\n{USER_TURN}"]
    assert texts([ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}]) == [call]


def test_last_turn_keeps_reasoning_that_a_next_message_would_hide(tmp_path: Path) -> None:
    forgets = NEXT_ROLE_ENDS.replace(
        "{{ m.content }}",
        "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}",
    )
    messages = [ASK, {**ANSWER, "reasoning_content": "first"}, MORE[0], {**MORE[1], "reasoning_content": "second"}]
    conversations, _, made = load(tmp_path / "a.jsonl", [{"messages": messages}], forgets, stops=ROLE_STOPS)
    assert trained_texts(made, conversations) == [f"b{USER_TURN}", f"<think>second</think>d{USER_TURN}"]
    conversations, _, made = load(tmp_path / "b.jsonl", [{"messages": messages}], FORGETS_REASONING)
    assert trained_texts(made, conversations) == [f"b{CLOSE}", f"<think>second</think>d{CLOSE}"]
