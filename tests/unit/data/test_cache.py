"""Cache of tokenised sets: a hit equals the rebuilt set, and any change misses the cache."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mcore_rl.config.schema import DataConfig, RolloutConfig
from mcore_rl.data.loading import load_prompts, load_supervised
from mcore_rl.data.prompts import LoadReport, PromptSet
from mcore_rl.data.tokenised import cache as cache_module
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.errors import ConfigError
from tests.unit.data.rows import jsonl

HIT = "read from data.cache_dir"
ROWS: list[dict[str, Any]] = [
    {"question": "1+1=", "answer": "2"},
    {"question": "é😀", "answer": ["a", 1, 0.1, None, {"b": True}], "extra_info": {"index": 3}, "max_turns": 2},
    {"question": "x" * 40, "answer": "too long"},
    {
        "prompt": [{"role": "user", "content": "hi"}],
        "reward_model": {"ground_truth": "4"},
        "sampling": {"temperature": 0.5, "stop": ["END"]},
    },
]


@pytest.fixture
def rows_file(tmp_path: Path) -> Path:
    return jsonl(tmp_path / "rows.jsonl", ROWS)


@pytest.fixture
def load(tmp_path: Path, tokenizer: Any) -> Any:
    def loaded(path: Any, limit: int = 30, *, tokenizer: Any = tokenizer, cached: bool = True, **data: Any) -> Any:
        options = {name: data.pop(name) for name in ("max_prompts", "runs_tools") if name in data}
        rollout = RolloutConfig(max_prompt_tokens=limit, keep_sampling_mask=data.pop("keep_sampling_mask", False))
        config = DataConfig(cache_dir=str(tmp_path / "cache") if cached else None, **data)
        return load_prompts(path, tokenizer, config, rollout, **options)

    loaded.tokenizer = tokenizer
    return loaded


def same(one: tuple[PromptSet, LoadReport], other: tuple[PromptSet, LoadReport]) -> bool:
    """Compare sets including the types of values, because 1 == 1.0 == True."""
    (mine, my_report), (theirs, their_report) = one, other
    arrays = all(
        np.array_equal(getattr(mine, name), getattr(theirs, name))
        and getattr(mine, name).dtype == getattr(theirs, name).dtype
        for name in ("tokens", "offsets")
    )
    lists = [{name: list(map(repr, value)) for name, value in each.columns.items()} for each in (mine, theirs)]
    counted = [
        (r.kept, r.dropped, r.truncated, r.longest_tokens, r.limits, r.of_files) for r in (my_report, their_report)
    ]
    return arrays and lists[0] == lists[1] and counted[0] == counted[1]


def test_cache_hit_returns_the_same_set(rows_file: Path, load: Any) -> None:
    plain, first, second = load(rows_file, cached=False), load(rows_file), load(rows_file)
    assert same(plain, first)
    assert same(plain, second)
    assert HIT not in first[1].notes
    assert HIT in second[1].notes
    tokens = second[0].tokens  # memory-mapped
    assert (tokens.flags.owndata, tokens.flags.writeable) == (False, False)
    assert second[0][1].token_ids.tolist() == load.tokenizer("é😀", add_special_tokens=False)["input_ids"]


def test_cache_hit_names_files_of_this_load(tmp_path: Path, rows_file: Path, load: Any) -> None:
    files = [rows_file, jsonl(tmp_path / "empty.jsonl", [])]
    load(files)
    (tmp_path / "elsewhere").mkdir()
    moved = [file.rename(tmp_path / "elsewhere" / file.name) for file in files]
    report = load(moved)[1]
    assert HIT in report.notes
    assert report.of_files == (3, 0)
    assert f"no row kept of {moved[1]}" in report.notes
    assert report.path.startswith(f"2 files ({moved[0]}")


def test_changed_content_of_equal_size_and_time_misses_the_cache(rows_file: Path, load: Any) -> None:
    load(rows_file)
    times = rows_file.stat().st_atime_ns, rows_file.stat().st_mtime_ns
    rows_file.write_text(rows_file.read_text().replace("1+1=", "1+2="))
    os.utime(rows_file, ns=times)
    prompts, report = load(rows_file)
    assert prompts.columns["text"][0] == "1+2="
    assert HIT not in report.notes


def test_changed_key_misses_the_cache(rows_file: Path, load: Any) -> None:
    load(rows_file)
    for changed in (
        {"limit": 31},
        {"plain_template": "{prompt}\n"},
        {"system_prompt": "Be terse."},
        {"long_prompts": "truncate_left"},
        {"answer_key": "answer"},
        {"max_prompts": 2},
        {"runs_tools": True},
        {"keep_sampling_mask": True},
    ):
        prompts, report = load(rows_file, **changed)
        assert HIT not in report.notes
        assert same((prompts, report), load(rows_file, cached=False, **changed))
        assert HIT in load(rows_file, **changed)[1].notes


def test_changed_tokenizer_or_chat_template_misses_the_cache(
    rows_file: Path, load: Any, bos_tokenizer_file: Path
) -> None:
    load(rows_file)
    other = load_tokenizer(bos_tokenizer_file)
    assert same(load(rows_file, tokenizer=other), load(rows_file, tokenizer=other, cached=False))
    chat = load.tokenizer
    for template in (
        "{{ messages[0].content }}",
        "{{ messages[0].content }}!",
        "{{ messages[0].content }}{{ strftime_now('%Y') }}",
    ):
        chat.chat_template = template
        assert HIT not in load(rows_file, tokenizer=chat)[1].notes
    assert HIT in load(rows_file, tokenizer=chat)[1].notes
    chat.chat_template = "{{ messages[0].content }}{{ think }}"
    for think in (False, True):
        assert HIT not in load(rows_file, tokenizer=chat, template_kwargs={"think": think})[1].notes


def test_template_with_the_date_misses_the_cache_on_another_day(
    rows_file: Path, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    load.tokenizer.chat_template = "{{ messages[0].content }}{{ strftime_now('%d') }}"
    load(rows_file)
    monkeypatch.setattr("mcore_rl.data.tokenised.cache.time", SimpleNamespace(strftime=lambda form: "2001-01-01"))
    assert HIT not in load(rows_file)[1].notes


@pytest.mark.parametrize("damage", ["byte", "short", "empty"])
def test_damaged_cache_file_is_rebuilt_and_noted(tmp_path: Path, rows_file: Path, load: Any, damage: str) -> None:
    plain = load(rows_file)
    (path,) = (tmp_path / "cache").iterdir()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes({"byte": content, "short": content[:-7], "empty": b""}[damage])
    again = load(rows_file)
    assert f"{path} was damaged and is built again" in again[1].notes
    assert same(plain, again)
    assert HIT in load(rows_file)[1].notes
    assert [each.name for each in (tmp_path / "cache").iterdir()] == [path.name]


def test_values_outside_json_are_not_cached(tmp_path: Path, load: Any) -> None:
    path = tmp_path / "rows.parquet"
    infos = [{"bytes": b"1"}, {"bytes": b"2"}]
    pq.write_table(pa.table({"question": ["a", "b"], "answer": ["1", "2"], "extra_info": infos}), path)
    for _ in range(2):
        prompts, report = load(path)
        assert prompts.columns["extra_info"] == infos
        assert "not kept in data.cache_dir: JSON cannot hold extra_info of prompt 1" in report.notes
    assert list((tmp_path / "cache").iterdir()) == []


def test_file_that_changes_while_it_is_read_is_not_cached(
    rows_file: Path, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = cache_module.digest

    def then_written(*args: Any) -> str:
        found = digest(*args)
        jsonl(rows_file, [*ROWS, ROWS[0]])
        return found

    monkeypatch.setattr(cache_module, "digest", then_written)
    prompts, report = load(rows_file)
    assert len(prompts) == 4
    assert "not kept in data.cache_dir: a file changed while it was read" in report.notes


def test_unwritable_cache_dir_raises_config_error(tmp_path: Path, rows_file: Path, load: Any) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ConfigError, match=r"^data\.cache_dir=.*cache: File exists .*set it to a directory"):
        load(rows_file)


def test_cache_stores_targets(tmp_path: Path, tokenizer: Any) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"question": "a", "answer": "bc"}, {"question": "d", "answer": "e" * 99}])
    limits = RolloutConfig(max_response_tokens=50)
    config = DataConfig(cache_dir=str(tmp_path / "cache"))
    first, second = (load_supervised(path, tokenizer, config, limits) for _ in range(2))
    plain = load_supervised(path, tokenizer, DataConfig(), limits)
    for made, report in (first, second):
        assert np.array_equal(made.target_tokens, plain[0].target_tokens)
        assert np.array_equal(made.target_offsets, plain[0].target_offsets)
        assert same((made.prompts, report), (plain[0].prompts, plain[1]))
    assert HIT in second[1].notes
    assert HIT not in load_prompts(path, tokenizer, config, limits)[1].notes  # prompts without targets
