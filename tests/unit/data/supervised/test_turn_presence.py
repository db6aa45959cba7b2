"""Conversations whose messages the chat template drops: they are rejected, and lost reasoning is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mcore_rl.errors import DataError
from tests.unit.data.chat.made import DROPS_ANSWERS, FORGETS_REASONING, HIDES_TOOLS, KNOWN_ROLES, THINKS
from tests.unit.data.supervised import test_conversations, test_pairs

CALL = {"type": "function", "function": {"name": "look", "arguments": {"q": "sum"}}}
ASK = {"role": "user", "content": "2+2?"}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "result 4"}
SAYS = {"role": "assistant", "content": "Four."}
NO_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML without tools."""
REASONS = {"role": "assistant", "content": "b", "reasoning_content": "first"}
LATER = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]
NOTE = "1 rows have reasoning in earlier assistant messages, which the chat template drops"


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (NO_CALLS, [ASK, CALLS], r"message 2 \(role 'assistant'\): 'look' is not in the conversation"),
        (NO_CALLS, [ASK, CALLS, RESULT, SAYS], r"message 2 \(role 'assistant'\)"),
        (DROPS_ANSWERS, [ASK, CALLS, RESULT, SAYS], r"message 3 \(role 'tool'\): 'result 4' is not in"),
        # The dropped text is part of another message.
        (DROPS_ANSWERS, [ASK, CALLS, {**RESULT, "content": "Four"}, SAYS], r"message 3 .* its content is not in"),
        (
            KNOWN_ROLES.replace("'developer'", "'critic'"),
            [ASK, SAYS, {"role": "critic", "content": "bad"}, *LATER],
            r"message 3 \(role 'critic'\)",
        ),
    ],
)
def test_conversation_with_a_dropped_message_is_rejected(
    tmp_path: Path, template: str, messages: list[Any], message: str
) -> None:
    with pytest.raises(DataError, match=rf"line 1: the tokenizer's chat template drops or changes {message}"):
        test_conversations.load(tmp_path / "a.jsonl", [{"messages": messages}], template)


def test_pair_with_a_dropped_call_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"drops or changes message 2 \(role 'assistant'\): 'look' is not in"):
        test_pairs.load(
            tmp_path / "a.jsonl", [{"prompt": [ASK], "chosen": [CALLS], "rejected": [SAYS]}], template=NO_CALLS
        )


@pytest.mark.parametrize(
    "messages",
    [
        [ASK, REASONS, *LATER],
        # Reasoning before the first trained turn, which the prompt shows or not: counted once.
        [ASK, {**REASONS, "train": False}, *LATER],
        [ASK, {**REASONS, "train": False}, LATER[0], REASONS, *LATER],
    ],
)
def test_rows_with_dropped_reasoning_are_counted_once(tmp_path: Path, messages: list[Any]) -> None:
    rows = [{"messages": messages}, {"messages": [ASK, SAYS]}]
    _, report, _ = test_conversations.load(tmp_path / "a.jsonl", rows, FORGETS_REASONING)
    assert [note for note in report.notes if "reasoning" in note] == [NOTE]


def test_shown_reasoning_is_not_counted(tmp_path: Path) -> None:
    _, report, _ = test_conversations.load(tmp_path / "a.jsonl", [{"messages": [ASK, REASONS, *LATER]}])
    assert not report.notes
    inline = {"role": "assistant", "content": "<think>x</think>b"}
    _, report, _ = test_conversations.load(tmp_path / "b.jsonl", [{"messages": [ASK, inline]}], THINKS)
    assert not report.notes


def test_pair_with_dropped_reasoning_in_both_responses_counts_once(tmp_path: Path) -> None:
    chosen, rejected = [REASONS, *LATER], [{**REASONS, "content": "x"}, *LATER]
    rows = [{"prompt": [ASK], "chosen": chosen, "rejected": rejected}]
    _, report, _ = test_pairs.load(tmp_path / "a.jsonl", rows, template=FORGETS_REASONING)
    assert [note for note in report.notes if "reasoning" in note] == [NOTE]


def test_calls_and_results_of_a_template_with_tools_pass(tmp_path: Path) -> None:
    rows = [{"messages": [ASK, CALLS, RESULT, SAYS]}]
    conversations, _, made = test_conversations.load(tmp_path / "a.jsonl", rows, HIDES_TOOLS)
    assert test_conversations.trained_texts(made, conversations)[1] == "Four.<|im_end|>"
