"""Pairs of responses as tokens: their formats, the tokens that are trained, limits, and rejected rows."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcore_rl.config.schema import DataConfig, RolloutConfig
from mcore_rl.data.supervised.encoder import ResponseEncoder
from mcore_rl.data.supervised.loading import load_texts
from mcore_rl.data.supervised.targets import Target, TextSet, scored_chunk, text_chunk
from mcore_rl.data.supervised.tokeniser import PAIRS, SCORED_PAIRS, Format
from mcore_rl.errors import DataError
from tests.unit.data.chat.made import CLOSE, LOOK, STABLE, tokenizer
from tests.unit.data.rows import jsonl, parquet

EOS = "<|endoftext|>"
USER = {"role": "user", "content": "2+2?"}


def say(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def load(
    path: Path,
    rows: list[dict[str, Any]],
    *,
    template: str | None = STABLE,
    limit: int = 500,
    format: Format = PAIRS,
    **data: Any,
) -> tuple[TextSet, Any, Any]:
    made = tokenizer(template)
    made.eos_token = CLOSE if template else EOS
    write = parquet if path.suffix == ".parquet" else jsonl
    limits = RolloutConfig(max_prompt_tokens=limit, max_response_tokens=limit)
    stops = (int(made.eos_token_id),)
    pairs, report = load_texts(write(path, rows), ResponseEncoder(made, DataConfig(**data), stops), format, limits)
    return pairs, report, made


def shown(made: Any, target: Target) -> list[tuple[str, bool]]:
    """Decode a target as runs of trained and other tokens."""
    edges = [0, *(np.flatnonzero(np.diff(target.trained)) + 1), len(target.ids)]
    return [(made.decode(target.ids[a:b]), bool(target.trained[a])) for a, b in itertools.pairwise(edges)]


def test_pairs_of_texts_follow_the_prompt_and_end_with_eos(tmp_path: Path) -> None:
    rows = [{"prompt": "2+2=", "chosen": "4", "rejected": "five"}]
    pairs, _, made = load(tmp_path / "a.jsonl", rows, template=None)
    assert made.decode(pairs.prompts[0].token_ids) == "2+2="
    assert shown(made, pairs.responses[0][0]) == [(f"4{EOS}", True)]
    assert shown(made, pairs.responses[1][0]) == [(f"five{EOS}", True)]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("form", ["implicit", "explicit", "repeated", "text prompt"])
def test_pairs_of_messages_train_the_turn_with_its_stop_token(tmp_path: Path, form: str, suffix: str) -> None:
    chosen, rejected = [say("Four.")], [say("Five.")]
    rows = {
        "implicit": {"chosen": [USER, *chosen], "rejected": [USER, *rejected]},
        "explicit": {"prompt": [USER], "chosen": chosen, "rejected": rejected},
        "repeated": {"prompt": [USER], "chosen": [USER, *chosen], "rejected": [USER, *rejected]},
        "text prompt": {"prompt": "2+2?", "chosen": [USER, *chosen], "rejected": [USER, *rejected]},
    }
    pairs, _, made = load(tmp_path / f"a.{suffix}", [rows[form]])
    assert made.decode(pairs.prompts[0].token_ids) == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert shown(made, pairs.responses[0][0]) == [("Four.<|im_end|>", True)]
    assert shown(made, pairs.responses[1][0]) == [("Five.<|im_end|>", True)]


def test_pairs_with_tools_train_the_turns_of_the_assistant_only(tmp_path: Path) -> None:
    call = say("", tool_calls=[{"type": "function", "function": {"name": "look", "arguments": {"q": "sum"}}}])
    chosen = [call, {"role": "tool", "content": "4"}, say("Four.")]
    rows = [{"prompt": [USER], "chosen": chosen, "rejected": [say("Five.")], "tools": [LOOK]}]
    pairs, _, made = load(tmp_path / "a.jsonl", rows)
    assert "Tools:look" in made.decode(pairs.prompts[0].token_ids)
    assert shown(made, pairs.responses[0][0]) == [
        ('<tool_call>\n{"name": "look", "arguments": {"q": "sum"}}\n</tool_call><|im_end|>', True),
        ("\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n", False),
        ("Four.<|im_end|>", True),
    ]


def test_pair_chunk_alternates_chosen_and_rejected(tmp_path: Path) -> None:
    call = say("", tool_calls=[{"type": "function", "function": {"name": "look", "arguments": {"q": "x"}}}])
    rows = [
        {"prompt": [USER], "chosen": [say("a")], "rejected": [say("bcd")], "tools": [LOOK]},
        {"prompt": [USER], "chosen": [call, {"role": "tool", "content": "4"}, say("e")], "rejected": [say("f")]},
    ]
    pairs, _, _ = load(tmp_path / "a.jsonl", rows)
    buffers, scalars = text_chunk(pairs, np.array([1, 0]))
    assert scalars.group_ids.tolist() == [0, 0, 1, 1]
    assert scalars.prompt_rows.tolist() == [1, 1, 0, 0]
    for number, target in enumerate(
        (pairs.responses[0][1], pairs.responses[1][1], pairs.responses[0][0], pairs.responses[1][0])
    ):
        tokens = buffers.tokens[buffers.token_offsets[number] : buffers.token_offsets[number + 1]]
        first, last = buffers.response_offsets[number : number + 2]
        assert tokens[buffers.prompt_tokens[number] :].tolist() == target.ids.tolist()
        assert buffers.trained[first:last].tolist() == target.trained.tolist()
        assert scalars.trained_tokens[number] == target.trained.sum()
        assert scalars.total_tokens[number] == len(tokens)
    assert scalars.trained_tokens[0] < scalars.response_tokens[0]


def test_scored_chunk_ends_at_the_last_token_that_is_not_padding(tmp_path: Path) -> None:
    rows = [{"prompt": "12", "chosen": "3", "rejected": "45", "margin": margin} for margin in (0.5, None)]
    pairs, report, made = load(tmp_path / "a.jsonl", rows, template=None, format=SCORED_PAIRS)
    assert pairs.margins.tolist() == [0.5, 0.0]
    assert "margin" not in str(report)
    for padding, end in ((None, EOS), (made.eos_token_id, "")):
        buffers, scalars = scored_chunk(pairs, np.array([1]), padding)
        texts = [buffers.tokens[a:b] for a, b in itertools.pairwise(buffers.token_offsets)]
        # The last token is a dummy, whose predictor is scored.
        assert [made.decode(text[:-1]) for text in texts] == [f"123{end}", f"1245{end}"]
        assert (buffers.prompt_tokens + 1).tolist() == [len(text) for text in texts]
        assert scalars.total_tokens.tolist() == buffers.prompt_tokens.tolist()
        assert scalars.trained_tokens.tolist() == buffers.trained.tolist() == [1, 1]
        assert scalars.group_ids.tolist() == [0, 0]


def test_pairs_for_dpo_ignore_margins(tmp_path: Path) -> None:
    row = {"prompt": "p", "chosen": "a", "rejected": "b", "margin": 2.0}
    pairs, report, _ = load(tmp_path / "a.jsonl", [row], template=None)
    assert pairs.margins.tolist() == [0.0]
    assert "ignored columns: margin" in str(report)


@pytest.mark.parametrize("margin", ["wide", True, [1.0], "nan"])
def test_load_scored_pairs_rejects_margins_that_are_no_numbers(tmp_path: Path, margin: object) -> None:
    row = {"prompt": "p", "chosen": "a", "rejected": "b", "margin": margin}
    with pytest.raises(DataError, match=r"line 1: margin is .*, not a finite number"):
        load(tmp_path / "a.jsonl", [row], template=None, format=SCORED_PAIRS)


def test_load_pairs_drops_and_counts_long_rows(tmp_path: Path) -> None:
    rows = [
        {"prompt": "p", "chosen": "123", "rejected": "1"},
        # Four characters and the end-of-sequence token exceed 4.
        {"prompt": "p", "chosen": "1", "rejected": "1234"},
        {"prompt": "12345", "chosen": "1", "rejected": "2"},
    ]
    pairs, report, _ = load(tmp_path / "a.jsonl", rows, template=None, limit=4)
    assert (len(pairs), report.kept, report.dropped) == (1, 1, 2)
    assert "longer than rollout.max_prompt_tokens=4 or rollout.max_response_tokens=4" in str(report)
    with pytest.raises(DataError, match=r"all 2 pairs of .*prompt has 5 tokens, the longest response 5"):
        load(tmp_path / "b.jsonl", rows[1:], template=None, limit=4)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "p", "rejected": "b"}, r"line 1 has no response in column 'chosen'"),
        ({"prompt": "p", "chosen": "a", "rejected": ""}, r"no response in column 'rejected'"),
        ({"prompt": "p", "chosen": "a", "rejected": [say("b")]}, r"one of chosen and rejected is a text"),
        ({"prompt": "p", "chosen": "a", "rejected": "a"}, r"chosen and rejected are equal"),
        ({"chosen": "a", "rejected": "b"}, r"texts as chosen and rejected, but no prompt"),
        ({"chosen": [USER, say("a")], "rejected": [say("b")]}, r"begin with different messages"),
        ({"prompt": [USER], "chosen": [USER], "rejected": [say("b")]}, r"chosen must begin with .* no message of"),
        ({"prompt": [USER], "chosen": [{**USER, "content": "x"}, say("a")], "rejected": [say("b")]}, r"not of 'user'"),
        (
            {"prompt": [USER], "chosen": [say(f"a{CLOSE}")], "rejected": [say("b")]},
            r"contains <\|im_end\|>, which ends",
        ),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "image": "x.png"}, r"has image, but prompts are text only"),
    ],
)
def test_load_pairs_rejects_malformed_rows(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(tmp_path / "a.jsonl", [row])


def test_load_pairs_rejects_a_turn_that_is_opened_in_another_way(tmp_path: Path) -> None:
    thinks = STABLE.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
    rows = [{"prompt": [USER], "chosen": [say("a")], "rejected": [say("b")]}]
    with pytest.raises(DataError, match=r"opens message 2 differently for generation .* enable_thinking=false"):
        load(tmp_path / "a.jsonl", rows, template=thinks)


def test_load_pairs_rejects_a_template_without_stop_token(tmp_path: Path) -> None:
    rows = [{"prompt": [USER], "chosen": [say("a")], "rejected": [say("b")]}]
    with pytest.raises(DataError, match=r"ends the model's turn with none of <\|im_end\|>"):
        load(tmp_path / "a.jsonl", rows, template=STABLE.replace("<|im_end|>", "<|user|>"))


def test_load_pairs_in_processes_gives_the_same_set(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}=", "chosen": f"{n}", "rejected": f"{n + 1}"} for n in range(1500)]
    one, _, _ = load(tmp_path / "a.jsonl", rows, template=None)
    two, _, _ = load(tmp_path / "a.jsonl", rows, template=None, workers=2)
    assert len(one) == len(two) == 1500
    np.testing.assert_array_equal(one.responses[1].ids, two.responses[1].ids)
    np.testing.assert_array_equal(one.responses[0].offsets, two.responses[0].offsets)
