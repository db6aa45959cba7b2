"""Columns are found per file; unsupported options of a row are rejected or noted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config.schema import DataConfig, RolloutConfig
from mcore_rl.data.columns import Columns, check_keys, format_notes
from mcore_rl.data.loading import load_prompts
from mcore_rl.errors import DataError
from mcore_rl.types import Prompt
from tests.unit.data.rows import jsonl, parquet

PLAIN = {"question": "1+1?", "answer": "2"}
MESSAGES = [{"role": "user", "content": "1+1?"}]
VERL = {"data_source": "gsm8k", "prompt": MESSAGES, "reward_model": {"ground_truth": "2"}, "extra_info": {"index": 1}}


def read(
    row: dict[str, Any], *, tools: bool = False, trained: bool = False, **data: Any
) -> tuple[Prompt, tuple[str, ...]]:
    columns = Columns(
        DataConfig(**data), RolloutConfig(), "data.val", Path("rows.jsonl"), runs_tools=tools, trained=trained
    )
    return columns.read("rows.jsonl, line 1", row), format_notes(columns.notes)


@pytest.mark.parametrize("prompt_key", [None, "question"])
def test_load_prompts_plain_and_verl_files_in_one_run(tmp_path: Path, tokenizer: Any, prompt_key: str | None) -> None:
    train, val = jsonl(tmp_path / "train.jsonl", [PLAIN]), parquet(tmp_path / "val.parquet", [VERL, VERL])
    config = DataConfig(train=str(train), val=str(val), prompt_key=prompt_key)
    check_keys(config, {"data.train": train, "data.val": val})
    for path, noted in ((train, False), (val, prompt_key is not None)):
        prompts, report = load_prompts(path, tokenizer, config, RolloutConfig())
        assert (prompts[0].messages, prompts[0].ground_truth) == (MESSAGES, "2")
        assert ("2 rows have no column 'question': verl's column prompt is used" in str(report)) == noted


@pytest.mark.parametrize(
    ("row", "key", "message"),
    [
        ({"id": 1, **PLAIN}, "questions", r"in column 'questions': the columns are question, .*set data\.prompt_key"),
        (PLAIN, "prompt", "in column 'prompt'"),
        ({"prompt": "1+1?", "answer": "2"}, "question", r"in column 'question'.*or to null"),
    ],
)
def test_columns_missing_prompt_key_is_rejected(row: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(DataError, match=f"line 1 has no prompt {message}"):
        read(row, prompt_key=key)


@pytest.mark.parametrize("key", ["prompt_key", "answer_key"])
def test_check_keys_unknown_in_all_files_is_rejected(tmp_path: Path, key: str) -> None:
    path = jsonl(tmp_path / "verl.jsonl", [VERL])
    with pytest.raises(DataError, match=rf"^data\.{key}: there is no column 'promts' in data\.val \(.*verl\.jsonl\)"):
        check_keys(DataConfig(**{key: "promts"}), {"data.val": path})
    check_keys(DataConfig(**{key: "prompt"}), {"data.val": path})


def test_columns_answer_key_precedes_verl_ground_truth() -> None:
    assert read({"prompt": "1+1?", "ground_truth": "2"})[0].ground_truth == "2"
    assert read({**VERL, "solution": "3"}, answer_key="solution")[0].ground_truth == "3"
    fields, notes = read(VERL, answer_key="solution")
    assert fields.ground_truth == "2"
    assert notes == ("1 rows have no column 'solution': verl's reward_model.ground_truth is used",)
    with pytest.raises(DataError, match=r"no ground truth in column 'answers': the columns are answer, question"):
        read(PLAIN, answer_key="answers")


def test_columns_json_text_of_messages_is_parsed_and_noted() -> None:
    fields, notes = read({**PLAIN, "question": json.dumps(MESSAGES)})
    assert fields.messages == MESSAGES
    assert notes == ("1 rows have chat messages as JSON text, which was parsed",)


def test_columns_other_json_in_prompt_stays_text() -> None:
    for text in ("[1, 2] sorted?", '[{"id": 1}]', '{"role": "user", "content": "a"}', "[{role"):
        fields, notes = read({**PLAIN, "question": text})
        assert (fields.messages, notes) == ([{"role": "user", "content": text}], ())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (str(MESSAGES), "not valid JSON.*write them as JSON"),
        (json.dumps(MESSAGES)[:-4], "not valid JSON.*write them as JSON"),
        (r'[{"role": "user", "content": "\ud83d"}]', "the prompt: content contains half of a character"),
        ('[{"role": "user", "content": ' + "[" * 100_000, "nested more than 100 levels deep"),
    ],
)
def test_columns_malformed_json_messages_are_rejected(text: str, message: str) -> None:
    with pytest.raises(DataError, match=rf"^data\.val: rows\.jsonl, line 1.*{message}"):
        read({**PLAIN, "question": text})


def test_columns_csv_objects_are_parsed_from_json_text() -> None:
    flat = {"prompt": "1+1?", "reward_model": '{"ground_truth": "2"}', "extra_info": '{"index": 1}'}
    fields, _ = read({**flat, "sampling": '{"top_p": 0.9}', "max_turns": " 4 "})
    assert (fields.ground_truth, fields.extra_info) == ("2", {"index": 1})
    assert (fields.sampling, fields.max_turns) == ({"top_p": 0.9}, 4)
    with pytest.raises(DataError, match="line 1: extra_info is not valid JSON"):
        read({**flat, "extra_info": "{'index': 1}"})


def test_columns_verl_tool_agent_without_tools_is_rejected() -> None:
    assert read({**VERL, "agent_name": "single_turn_agent"})[1] == ()
    with pytest.raises(DataError, match=r"line 1 has agent_name 'tool_agent', .*without tools; set data\.val"):
        read({**VERL, "agent_name": "tool_agent"})
    assert read({**PLAIN, "agent_name": "Ada"})[1] == (
        "1 rows have agent_name, which is ignored: responses are single turns",
    )


def test_columns_unused_tool_arguments_are_noted_once() -> None:
    columns = Columns(DataConfig(), RolloutConfig(), "data.train", Path("rows.jsonl"))
    info = {"need_tools_kwargs": True, "tools_kwargs": {"calc": {"x": 1}}, "interaction_kwargs": {}}
    for row in ({**VERL, "extra_info": info}, VERL, {**VERL, "extra_info": info}):
        columns.read("a place", row)
    assert format_notes(columns.notes) == (
        "2 rows have need_tools_kwargs, tools_kwargs, which are ignored: responses are single turns without tools",
    )


def test_columns_with_tools_accepts_verl_agents_and_notes_others() -> None:
    info = {"need_tools_kwargs": True, "tools_kwargs": {"calc": {"create_kwargs": {"x": 1}}}, "interaction_kwargs": {}}
    for agent in ("tool_agent", "single_turn_agent", None):
        fields, notes = read({**VERL, "agent_name": agent, "extra_info": info}, tools=True)
        assert (fields.extra_info, notes) == (info, ())
    assert read({**VERL, "agent_name": "mine", "tools_kwargs": {"calc": {}}}, tools=True)[1] == (
        "1 rows have agent_name 'mine', which is ignored: rollout.episode selects the episode",
        "1 rows have columns tools_kwargs, which are ignored: move them into extra_info",
    )


def test_columns_media_column_is_rejected_by_name() -> None:
    for column in ("image", "videos", "audio", "Image", "image_url", "multi_modal_data"):
        for empty in (None, [], "", {"bytes": None, "path": None}):
            read({**PLAIN, column: empty})
        with pytest.raises(DataError, match=rf"line 1 has {column}, but prompts are text only.*set data\.val"):
            read({**PLAIN, column: {"bytes": "x"}})


def test_columns_system_prompt_is_prepended_if_missing() -> None:
    expected = [{"role": "system", "content": "Be terse."}, *MESSAGES]
    assert read(VERL, system_prompt="Be terse.")[0].messages == expected
    assert read(PLAIN, system_prompt="Be terse.")[0].messages == expected
    assert read(VERL)[0].messages == MESSAGES
    for role in ("system", "developer"):
        own = [{"role": role, "content": "Be kind."}, *MESSAGES]
        assert read({**VERL, "prompt": own}, system_prompt="Be terse.")[0].messages == own


def test_columns_row_sampling_options_are_read() -> None:
    asked = {"sampling": {"temperature": 0.5, "top_p": None, "top_k": 20.0, "max_response_tokens": 64}, "max_turns": 3}
    for row in ({**VERL, **asked}, {**VERL, "extra_info": asked}):
        fields, _ = read(row)
        assert fields.sampling == {"temperature": 0.5, "top_k": 20, "max_response_tokens": 64}
        assert type(fields.sampling["top_k"]) is int
        assert fields.max_turns == 3
    assert read(VERL)[0].sampling is read({**VERL, "sampling": {"top_k": None}})[0].sampling is None


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"top_p": 0.9}, r"sampling\.top_p is 0\.9, which samples from fewer tokens than the full softmax"),
        ({"top_k": 20}, r"sampling\.top_k is 20, which samples from fewer tokens than the full softmax"),
        ({"temperature": 0}, r"sampling\.temperature is 0, which is greedy"),
        ({"temperature": 0.001}, r"sampling\.temperature is 0\.001, which is below 0\.01"),
    ],
)
def test_columns_trained_row_restricted_sampling_is_rejected(sampling: dict[str, float], message: str) -> None:
    assert read({**VERL, "sampling": sampling})[0].sampling == sampling
    with pytest.raises(DataError, match=rf"^data\.val: rows\.jsonl, line 1: {message}"):
        read({**VERL, "sampling": sampling}, trained=True)
    allowed = {"temperature": 0.3, "top_p": 1.0, "top_k": -1, "stop": "END"}
    assert read({**VERL, "sampling": allowed}, trained=True)[0].sampling == {**allowed, "stop": ["END"]}


def test_load_prompts_training_rows_are_checked_as_trained(tmp_path: Path, tokenizer: Any) -> None:
    path = str(jsonl(tmp_path / "rows.jsonl", [{**PLAIN, "sampling": {"top_p": 0.9}}]))
    config = DataConfig(train=path, val=path, cache_dir=str(tmp_path / "cache"))
    assert load_prompts(path, tokenizer, config, RolloutConfig(), "data.val")[0][0].sampling == {"top_p": 0.9}
    with pytest.raises(DataError, match=r"^data\.train: .*line 1: sampling\.top_p is 0\.9"):
        load_prompts(path, tokenizer, config, RolloutConfig(), "data.train")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"sampling": {"temperatur": 1}}, "sampling has 'temperatur'; did you mean temperature"),
        ({"sampling": {"beam_width": 1}}, "sampling has 'beam_width'; it may set temperature"),
        ({"sampling": {"min_p": 1.5}}, r"sampling\.min_p is 1\.5, but must be"),
        ({"sampling": {"repetition_penalty": 1.1}}, r"sampling\.repetition_penalty changes the sampling distribution"),
        ({"sampling": {"min_tokens": 3}}, r"sampling\.min_tokens changes the sampling distribution"),
        ({"sampling": {"top_k": 0}}, r"sampling\.top_k is 0, which leaves no token"),
        ({"sampling": {"stop": ""}}, r"sampling\.stop is , which has an empty text"),
        ({"sampling": {"stop": [1]}}, r"sampling\.stop is \[1\], which must be a text or a list of texts"),
        ({"sampling": {"stop": ["a"] * 17}}, r"sampling\.stop .*has 17 texts, but may have 16"),
        ({"sampling": {"temperature": -0.1}}, r"sampling\.temperature is -0\.1, but must be 0 or more"),
        ({"sampling": {"top_p": 0}}, r"sampling\.top_p is 0, but must be above 0"),
        ({"sampling": {"top_k": 1.5}}, r"sampling\.top_k is 1\.5, not a whole number"),
        ({"sampling": {"temperature": float("nan")}}, "not a finite number"),
        ({"sampling": {"temperature": True}}, "is True, not a number"),
        ({"sampling": {"temperature": "1"}}, "is '1', not a number"),
        ({"sampling": {"max_response_tokens": 513}}, r"above rollout\.max_response_tokens=512, .*raise rollout\."),
        ({"sampling": {"max_response_tokens": 0}}, "but must be at least 1"),
        ({"sampling": [1]}, "sampling is list, not an object"),
        ({"sampling": {"top_k": 1}, "extra_info": {"sampling": {"top_k": 1}}}, "both as a column and in extra_info"),
        ({"max_turns": 0}, "max_turns is 0, not a whole number above 0"),
        ({"max_turns": 2.5}, r"max_turns is 2\.5, not"),
        ({"max_turns": "many"}, "max_turns is 'many', not"),
        ({"max_turns": float("nan")}, "max_turns is nan, not"),
        ({"max_turns": True}, "max_turns is True, not"),
    ],
)
def test_columns_invalid_row_option_names_its_line(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"^data\.val: rows\.jsonl, line 1.*{message}"):
        read({**VERL, **row})


def test_load_prompts_csv_without_header_is_rejected(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"{'Natalia sold clips ' * 9},72\nWeng earns,10\n")
    named = r"its columns, which line 1 names, are Natalia.{33}\.\.\., 72; set data\.prompt_key"
    with pytest.raises(DataError, match=f"line 2 has no prompt: {named}"):
        load_prompts(path, tokenizer, DataConfig(), RolloutConfig())
