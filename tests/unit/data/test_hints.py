"""Hints of training rows: rendered prompts for teachers, and their way into trajectories."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcore_rl.config.schema import DataConfig, RolloutConfig
from mcore_rl.data.columns import check_keys
from mcore_rl.data.kept_steps.reader import _buffers
from mcore_rl.data.loading import load_prompts
from mcore_rl.data.prompts import PromptSet
from mcore_rl.data.trajectories import after_hints, has_hint, hint_arrays, join_rows, take_rows
from mcore_rl.errors import DataError
from mcore_rl.rollout.trajectories import hinted_prompt, pack_trajectories
from mcore_rl.types import Prompt, Trajectory, TrajectoryBuffers
from tests.unit.data.rows import jsonl
from tests.unit.data.test_prompts import CHAT_TEMPLATE

TOLD = [{"role": "system", "content": "s"}, {"role": "user", "content": "told"}]
ROWS: list[dict[str, Any]] = [
    {"prompt": "1+1? {hint}", "answer": 2, "extra_info": {"steps": "two", "told": TOLD}},
    {"prompt": [*TOLD, {"role": "assistant", "content": "So"}], "answer": "4", "extra_info": {"steps": None}},
]


@pytest.fixture
def texts(tmp_path: Path, tokenizer: Any) -> Any:
    """Reader of a file with rows. It returns the texts of the prompts with hints, and the report."""
    tokenizer.chat_template = CHAT_TEMPLATE

    def read(key: str, rows: list[dict[str, Any]] = ROWS, limit: int = 100, **data: Any) -> tuple[list[str], str]:
        config = DataConfig(hint_key=key, max_hinted_tokens=limit, **data)
        path = jsonl(tmp_path / "rows.jsonl", rows)
        prompts, report = load_prompts(path, tokenizer, config, RolloutConfig(max_prompt_tokens=90))
        hints = [prompts[row].hint_ids for row in range(len(prompts))]
        return [tokenizer.decode(ids) for ids in hints if ids is not None], str(report)

    return read


def hint_ids(prompts: PromptSet, row: int) -> list[int]:
    found = prompts[row].hint_ids
    assert found is not None
    return [int(token) for token in found]


def test_hint_text_becomes_part_of_the_last_user_message(texts: Any) -> None:
    assert texts("answer", hint_template="{hint}: {prompt} {hint}")[0] == [
        "<user>2: 1+1? {hint} 2</user><assistant>",
        "<system>s</system><user>4: told 4</user><assistant>So",
    ]


def test_hint_of_a_field_may_be_absent(texts: Any) -> None:
    assert texts("extra_info.steps")[0] == ["<user>1+1? {hint}\n\ntwo</user><assistant>", ""]
    found, _ = texts("extra_info.steps", system_prompt="be terse")
    assert found[0].startswith("<system>be terse</system><user>")


def test_hint_of_blanks_is_no_hint(texts: Any) -> None:
    assert texts("answer", [ROWS[0] | {"answer": " \n\t"}, ROWS[1]])[0][0] == ""


def test_hint_messages_replace_the_prompt(texts: Any) -> None:
    assert texts("extra_info.told")[0] == ["<system>s</system><user>told</user><assistant>", ""]


def test_hint_in_json_text_of_a_csv_file_is_parsed(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = CHAT_TEMPLATE
    path = tmp_path / "rows.csv"
    fields = json.dumps({"told": TOLD, "steps": "two"}).replace('"', '""')
    path.write_text(
        f'prompt,answer,fields,told\n1+1?,2,"{fields}","{json.dumps(TOLD).replace(chr(34), chr(34) * 2)}"\n'
    )
    for key, wanted in (("fields.steps", "1+1?\n\ntwo"), ("fields.told", "told"), ("told", "told")):
        config = DataConfig(hint_key=key)
        hint = load_prompts(str(path), tokenizer, config, RolloutConfig(max_prompt_tokens=90))[0][0].hint_ids
        assert hint is not None
        assert f"<user>{wanted}</user>" in tokenizer.decode(hint)


def test_rows_that_are_too_long_with_the_hint_are_dropped(texts: Any) -> None:
    found, report = texts("answer", limit=40)
    assert len(found) == 1
    assert "1 dropped (longer than rollout.max_prompt_tokens=90, 1 longer with the hint than " in report
    with pytest.raises(DataError, match=r"2 longer with the hint than data\.max_hinted_tokens=3\); raise the limits"):
        texts("answer", limit=3)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": {"a": 1}}, r"line 1: hint 'answer' is dict, not a text or a list of chat messages"),
        ({"answer": [{"role": "user"}]}, r"line 1: hint 'answer': message 1"),
        ({"prompt": [{"role": "system", "content": "s"}]}, r"line 1: hint 'answer' is a text, and .* no user message"),
    ],
)
def test_hint_of_another_form_is_rejected(texts: Any, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        texts("answer", [ROWS[0] | row])


def test_hint_key_must_name_a_column(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", ROWS)
    check_keys(DataConfig(hint_key="extra_info.steps"), {"data.train": [str(path)]})
    with pytest.raises(DataError, match=r"^data\.hint_key: there is no column 'solution' .* or to null for no hints"):
        check_keys(DataConfig(hint_key="solution.text"), {"data.train": [str(path)]})


def test_validation_rows_and_cached_rows_keep_hints_apart(tmp_path: Path, tokenizer: Any) -> None:
    path = jsonl(tmp_path / "rows.jsonl", ROWS)
    config, rollout = DataConfig(hint_key="answer", cache_dir=str(tmp_path)), RolloutConfig(max_prompt_tokens=90)
    first, again = (load_prompts(path, tokenizer, config, rollout)[0] for _ in range(2))
    assert "read from" in str(load_prompts(path, tokenizer, config, rollout)[1])
    for other in (again, first.take([0, 1])):
        assert [hint_ids(first, row) for row in range(2)] == [hint_ids(other, row) for row in range(2)]
    assert len(hint_ids(first, 0)) > len(first[0].token_ids)
    assert load_prompts(path, tokenizer, config, rollout, "data.val")[0][0].hint_ids is None


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def packed(hints: list[np.ndarray | None]) -> TrajectoryBuffers:
    zeros = np.zeros(2)
    made = [Trajectory(ints(1, 2)[: row + 1], ints(7, 8 + row), zeros, zeros.astype(np.int32)) for row in range(2)]
    return pack_trajectories(made, hints=hints)


def test_hinted_prompt_continues_like_the_sequence() -> None:
    prompt = Prompt(0, ints(1, 2), "", "", None, hint_ids=ints(5, 6, 7))
    response = Trajectory(ints(1, 2), ints(3), np.zeros(1), np.zeros(1, np.int32))
    starts = (ints(1, 2), [5, 6, 7]), (ints(1, 2, 9), [5, 6, 7, 9]), (ints(1, 2, 9, 9), []), (ints(1, 3), [])
    for start, wanted in starts:
        found = hinted_prompt(replace(response, prompt_ids=start), prompt, 2)
        assert found is not None
        assert found.tolist() == wanted
    assert hinted_prompt(response, replace(prompt, hint_ids=None), 2) is None


def test_after_hints_replaces_prompts_and_nothing_else() -> None:
    buffers = packed([ints(4, 5, 6), ints()])
    assert has_hint(buffers).tolist() == [True, False]
    found = after_hints(buffers)
    assert found.tokens.tolist() == [4, 5, 6, 7, 8, 1, 2, 7, 9]
    assert (found.token_offsets.tolist(), found.prompt_tokens.tolist()) == ([0, 5, 9], [3, 2])
    assert found.response_offsets is buffers.response_offsets
    assert not has_hint(found).any()
    plain = packed([])
    assert after_hints(plain) is plain


def test_hints_follow_selected_and_joined_rows() -> None:
    hinted, plain = packed([ints(4, 5, 6), ints(9)]), packed([])
    joined = join_rows([plain, take_rows(hinted, np.array([1, 0]))])
    assert joined.hint_tokens is not None
    assert joined.hint_offsets is not None
    assert (joined.hint_tokens.tolist(), joined.hint_offsets.tolist()) == ([9, 4, 5, 6], [0, 0, 0, 1, 4])
    assert join_rows([plain, plain]).hint_tokens is None
    assert hint_arrays([None, None]) == (None, None)


def test_damaged_hints_in_a_file_are_named() -> None:
    arrays = {name: value for name, value in vars(packed([ints(4), ints()])).items() if isinstance(value, np.ndarray)}
    arrays |= {name: arrays[name].astype(np.float32) for name in ("logp_rollout",)}
    assert has_hint(_buffers(Path("f"), arrays, 2)).tolist() == [True, False]
    with pytest.raises(DataError, match="it has only one of hint_tokens and hint_offsets"):
        _buffers(Path("f"), {name: value for name, value in arrays.items() if name != "hint_tokens"}, 2)
    with pytest.raises(DataError, match="hint_offsets are no offsets of its trajectories"):
        _buffers(Path("f"), arrays | {"hint_offsets": np.array([0, 2, 1])}, 2)
