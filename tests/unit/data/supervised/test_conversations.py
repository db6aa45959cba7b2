"""Conversations as tokens: their trained turns equal transformers' assistant masks; limits and rejected rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcore_rl.config.schema import DataConfig, RolloutConfig
from mcore_rl.data.supervised.encoder import ResponseEncoder
from mcore_rl.data.supervised.loading import load_texts
from mcore_rl.data.supervised.targets import TextSet, text_chunk
from mcore_rl.data.supervised.tokeniser import CONVERSATIONS
from mcore_rl.errors import DataError
from tests.unit.data.chat.made import (
    CLOSE,
    FORGETS_REASONING,
    LOOK,
    STABLE,
    stop_ids,
    tokenizer,
)
from tests.unit.data.rows import jsonl, parquet

CALL = {"type": "function", "function": {"name": "look", "arguments": {"q": "sum"}}}
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "Sure?\n"},
    {"role": "assistant", "content": " Yes.\n"},
]


def load(
    path: Path,
    rows: list[dict[str, Any]],
    template: str | None = STABLE,
    *,
    limit: int = 500,
    stops: Sequence[str] = (CLOSE,),
    **data: Any,
) -> tuple[TextSet, Any, Any]:
    made = tokenizer(template)
    write = parquet if path.suffix == ".parquet" else jsonl
    limits = RolloutConfig(max_prompt_tokens=limit, max_response_tokens=limit)
    ids = tuple(stop_ids(made, stops))
    conversations, report = load_texts(
        write(path, rows), ResponseEncoder(made, DataConfig(**data), ids), CONVERSATIONS, limits
    )
    return conversations, report, made


def trained_texts(made: Any, conversations: TextSet, row: int = 0) -> list[str]:
    target = conversations.responses[0][row]
    edges = [0, *(np.flatnonzero(np.diff(target.trained)) + 1), len(target.ids)]
    return [made.decode(target.ids[a:b]) for a, b in itertools.pairwise(edges) if target.trained[a]]


def whole(made: Any, conversations: TextSet, row: int = 0) -> tuple[list[int], list[int]]:
    """Return the tokens of a row, and 1 for each trained one."""
    prompt, target = conversations.prompts[row].token_ids.tolist(), conversations.responses[0][row]
    return prompt + target.ids.tolist(), [0] * len(prompt) + target.trained.tolist()


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_every_turn_of_the_assistant_is_trained_with_its_stop_token(tmp_path: Path, suffix: str) -> None:
    conversations, _, made = load(tmp_path / f"a.{suffix}", [{"messages": TURNS, "tools": [LOOK]}])
    assert trained_texts(made, conversations) == [
        '<tool_call>\n{"name": "look", "arguments": {"q": "sum"}}\n</tool_call><|im_end|>',
        "Four.<|im_end|>",
        " Yes.\n<|im_end|>",
    ]


def test_tokens_and_mask_equal_transformers_assistant_mask(tmp_path: Path) -> None:
    """transformers marks the text in {% generation %}: the content, the calls and the stop token of each turn."""
    end = "<|im_end|>\n{% endfor %}"
    # Only one branch can contain the block, so other roles are rendered apart.
    body = STABLE.partition("<|im_start|>{{ m.role }}\n")[2].partition(end)[0]
    marked = STABLE.replace(
        body + end,
        "{% if m.role == 'assistant' %}{% generation %}"
        + body
        + "<|im_end|>{% endgeneration %}{% else %}"
        + body
        + "<|im_end|>{% endif %}\n{% endfor %}",
    )
    conversations, _, made = load(tmp_path / "a.jsonl", [{"messages": TURNS, "tools": [LOOK]}], marked)
    expected = made.apply_chat_template(
        TURNS, tools=[LOOK], return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    tokens, mask = whole(made, conversations)
    # The text after the last trained token has no effect and is left out.
    assert tokens == expected["input_ids"][: len(tokens)]
    assert mask == expected["assistant_masks"][: len(tokens)]
    assert not any(expected["assistant_masks"][len(tokens) :])


@pytest.mark.parametrize("flag", [{"train": False}, {"weight": 0}])
def test_flagged_turns_are_not_trained(tmp_path: Path, flag: dict[str, Any]) -> None:
    messages = [*TURNS[:4], {**TURNS[4], **flag}, *TURNS[5:]]
    conversations, _, made = load(tmp_path / "a.jsonl", [{"messages": messages, "tools": [LOOK]}])
    assert [text[:5] for text in trained_texts(made, conversations)] == ["<tool", " Yes."]
    first = [{**TURNS[2], **flag}, *TURNS[3:]]
    conversations, _, made = load(tmp_path / "b.jsonl", [{"messages": [*TURNS[:2], *first], "tools": [LOOK]}])
    assert trained_texts(made, conversations) == ["Four.<|im_end|>", " Yes.\n<|im_end|>"]
    assert "<tool_call>" in made.decode(conversations.prompts[0].token_ids)


def test_sharegpt_and_completions_are_read(tmp_path: Path) -> None:
    rows = [
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]},
        {"prompt": "Hi", "completion": "Hello."},
        {"prompt": [{"role": "user", "content": "Hi"}], "completion": [{"role": "assistant", "content": "Hello."}]},
        {"prompt": "Hi", "answer": "Hello."},
    ]
    conversations, _, made = load(tmp_path / "a.jsonl", rows)
    assert len({repr(whole(made, conversations, row)) for row in range(4)}) == 1
    assert trained_texts(made, conversations) == ["Hello.<|im_end|>"]


def test_reasoning_is_trained_where_the_template_shows_it(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "first"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "reasoning_content": "second"},
    ]
    conversations, _, made = load(tmp_path / "a.jsonl", [{"messages": messages}], FORGETS_REASONING)
    assert trained_texts(made, conversations) == ["b<|im_end|>", "<think>second</think>d<|im_end|>"]


def test_turn_opened_differently_before_the_last_is_skipped_and_noted(tmp_path: Path) -> None:
    """A template that shows reasoning only in the last turn opens a turn after a call with other text before it."""
    shows_last = STABLE.replace("{% if m.reasoning_content %}", "{% if m.reasoning_content and loop.index > 3 %}")
    late = shows_last.replace("loop.index > 3", "messages | length < 4")
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "reasoning_content": "first", "tool_calls": [CALL]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    conversations, report, made = load(tmp_path / "a.jsonl", [{"messages": messages, "tools": [LOOK]}], late)
    assert [text[:2] for text in trained_texts(made, conversations)] == ["<t", "d<"]
    assert "1 rows have turns that the chat template shows differently once later messages follow" in str(report)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": TURNS[:2]}, r"messages has no turn of the assistant that is trained"),
        ({"messages": TURNS[4:]}, r"messages begins with a trained turn"),
        ({"messages": "x"}, r"messages is not a list"),
        ({"messages": [*TURNS[:2], {**TURNS[4], "weight": 0.5}]}, r"message 3 has weight=0\.5"),
        ({"messages": [*TURNS[:2], {**TURNS[4], "content": f"a{CLOSE}b"}]}, r"message 3 contains <\|im_end\|>"),
        ({"conversations": [{"from": "robot", "value": "x"}]}, r"message 1 is from 'robot'"),
        ({"prompt": "x"}, r"neither messages nor a target text in column 'completion' or 'answer'"),
    ],
)
def test_load_conversations_rejects_malformed_rows(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"line 1.*{message}"):
        load(tmp_path / "a.jsonl", [row])


def test_load_conversations_limits_whole_sequences(tmp_path: Path) -> None:
    rows = [
        {"prompt": "123456", "completion": "1"},
        {"prompt": "1", "completion": "123456"},
        {"prompt": "12345678", "completion": "9"},
    ]
    conversations, report, _ = load(tmp_path / "a.jsonl", rows, None, limit=4)
    # Prompt, target and end token: 8, 8 and 10 tokens.
    assert (len(conversations), report.dropped) == (2, 1)
    assert "longer than rollout.max_prompt_tokens + rollout.max_response_tokens = 8" in str(report)


def test_conversation_chunk_marks_trained_tokens(tmp_path: Path) -> None:
    conversations, _, made = load(
        tmp_path / "a.jsonl", [{"messages": TURNS, "tools": [LOOK]}, {"prompt": "p", "answer": "a"}]
    )
    buffers, scalars = text_chunk(conversations, np.array([1, 0, 1]))
    assert scalars.group_ids.tolist() == [0, 1, 2]
    for number, row in enumerate([1, 0, 1]):
        tokens, mask = whole(made, conversations, row)
        assert buffers.tokens[slice(*buffers.token_offsets[number : number + 2])].tolist() == tokens
        run = buffers.trained[slice(*buffers.response_offsets[number : number + 2])].tolist()
        assert [0] * int(buffers.prompt_tokens[number]) + run == mask
        assert scalars.trained_tokens[number] == sum(mask)
