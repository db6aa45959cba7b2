"""Responses and conversations that are JSON text, binary data or times: parsed as prompts are, or rejected."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.errors import DataError
from tests.unit.data.supervised import test_conversations, test_pairs

ASK = {"role": "user", "content": "2+2?"}
FOUR, FIVE = {"role": "assistant", "content": "4"}, {"role": "assistant", "content": "5"}
NOTE = "have chat messages as JSON text, which was parsed"
TIME = datetime.datetime(2025, 1, 2)


def test_messages_as_json_text_are_parsed_in_responses(tmp_path: Path) -> None:
    row = {"prompt": "2+2?", "chosen": json.dumps([FOUR]), "rejected": json.dumps([FIVE])}
    pairs, report, made = test_pairs.load(tmp_path / "a.jsonl", [row])
    assert made.decode(pairs.responses[0][0].ids) == "4<|im_end|>"
    assert made.decode(pairs.responses[1][0].ids) == "5<|im_end|>"
    assert NOTE in str(report)
    rows = [{"prompt": "2+2?", "completion": json.dumps([FOUR])}, {"prompt": "2+2?", "answer": json.dumps([FOUR])}]
    rows += [{"messages": json.dumps([ASK, FOUR])}]
    rows += [{"conversations": json.dumps([{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}])}]
    conversations, report, made = test_conversations.load(tmp_path / "b.jsonl", rows)
    for row_index in range(4):
        assert test_conversations.trained_texts(made, conversations, row_index) == ["4<|im_end|>"]
    assert f"4 rows {NOTE}" in str(report)


def test_invalid_json_text_of_messages_is_rejected(tmp_path: Path) -> None:
    row = {"prompt": "p", "chosen": "[{'role': 'assistant'}]", "rejected": "b"}
    with pytest.raises(DataError, match=r"line 1: chosen is not valid JSON: .*looks like a list of chat messages"):
        test_pairs.load(tmp_path / "a.jsonl", [row])


def test_lists_that_are_no_messages_stay_text(tmp_path: Path) -> None:
    pairs, _, made = test_pairs.load(tmp_path / "a.jsonl", [{"prompt": "p", "chosen": "[1, 2]", "rejected": "[]"}])
    assert made.decode(pairs.responses[0][0].ids) == "[1, 2]<|im_end|>"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"\xff\xfe", r"has binary data that is not UTF-8"),
        ([{"role": "assistant", "content": b"\xff\xfe"}], r"has binary data that is not UTF-8"),
        (TIME, r"is datetime, not a text"),
        ([{"role": "assistant", "content": TIME}], r"message 1: content is datetime, not a text"),
    ],
)
def test_binary_data_and_times_are_no_responses(tmp_path: Path, value: Any, message: str) -> None:
    row = {"prompt": "p", "chosen": value, "rejected": value}
    with pytest.raises(DataError, match=rf": chosen:? {message}"):
        test_pairs.load(tmp_path / "a.parquet", [row])
    with pytest.raises(DataError, match=rf": completion:? {message}"):
        test_conversations.load(tmp_path / "b.parquet", [{"prompt": "p", "completion": value}])


def test_conversations_with_binary_content_are_rejected(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": b"a"}, {"role": "assistant", "content": b"\xfe"}]}]
    with pytest.raises(DataError, match=r": messages has binary data that is not UTF-8"):
        test_conversations.load(tmp_path / "a.parquet", rows)


def test_binary_columns_with_text_are_read(tmp_path: Path) -> None:
    conversations, _, made = test_conversations.load(tmp_path / "a.parquet", [{"prompt": "p", "completion": b"ab"}])
    assert test_conversations.trained_texts(made, conversations) == ["ab<|im_end|>"]
