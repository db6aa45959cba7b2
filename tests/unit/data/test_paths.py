"""Resolution of keys to files, their order, and errors before a row is read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pytest

from mcore_rl.data.files import read_rows
from mcore_rl.data.sources.paths import file_weights, find_files
from mcore_rl.errors import ConfigError, DataError

SAVED = Path(__file__).with_name("saved_dataset")
"""Saved by Dataset.save_to_disk(num_shards=2) of `datasets` 5.2.0, from the rows of `saved_rows`."""


def saved_rows() -> list[dict[str, Any]]:
    return [
        {
            "prompt": [{"role": "user", "content": f"{i}+1?"}],
            "reward_model": {"ground_truth": str(i + 1), "style": "rule"},
            "data_source": "sums",
            "extra_info": {"index": i, "none": None},
        }
        for i in range(7)
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.jsonl", "a.jsonl", "c.csv", "x/d.jsonl", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(
            json.dumps({"question": name}) if name.endswith("jsonl") else f"question\n{name}\n"
        )
    return tmp_path


def names_of(names: Any, folder: Path) -> list[str]:
    listed = [names] if isinstance(names, str) else names
    return [str(path.relative_to(folder)) for path in find_files([f"{folder}/{name}" for name in listed], "data.val")]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ("b.jsonl", ["b.jsonl"]),
        (["b.jsonl", "a.jsonl"], ["b.jsonl", "a.jsonl"]),
        ("*.jsonl", ["a.jsonl", "b.jsonl"]),
        ("**/*.jsonl", ["a.jsonl", "b.jsonl", "x/d.jsonl"]),
        ("", ["a.jsonl", "b.jsonl", "c.csv"]),  # the directory
        (["x", "[ab].jsonl"], ["x/d.jsonl", "a.jsonl", "b.jsonl"]),
    ],
)
def test_find_files_keeps_order_and_sorts_globs(folder: Path, names: Any, found: list[str]) -> None:
    assert names_of(names, folder) == found


def test_find_files_existing_name_is_not_a_glob(folder: Path) -> None:
    (folder / "[ab].jsonl").touch()
    assert names_of("[ab].jsonl", folder) == ["[ab].jsonl"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "^data.val is an empty list"),
        (["z*.jsonl"], r"there is no file .*z\*\.jsonl; set data\.val to a .*glob that matches"),
        (["a.jsonl,b.jsonl"], r"there is no file .*write several files as a list: '\[a\.jsonl, b\.jsonl\]'"),
        (["*.md"], r"README\.md is neither \.jsonl nor"),
        (["*.jsonl", "a.jsonl"], r"names .*a\.jsonl twice, by .*\*\.jsonl and by .*a\.jsonl; .*data\.weights"),
    ],
)
def test_find_files_name_without_prompts_is_rejected(folder: Path, names: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        find_files([f"{folder}/{name}" for name in names], "data.val")


def test_find_files_directory_of_several_splits_is_rejected(folder: Path) -> None:
    for name in ("train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "test-00000-of-00001.jsonl"):
        (folder / "x" / name).write_text("{}\n")
    with pytest.raises(DataError, match=r"several splits \(test, train\); select one with a glob, such as .*train\*"):
        names_of("x", folder)
    assert len(names_of("x/train*", folder)) == 2
    (folder / "above").mkdir()
    shutil.move(folder / "x", folder / "above" / "x")
    with pytest.raises(DataError, match=r"^data\.val: .* contains no .* such files are in .*/x$"):
        names_of("above", folder)


def test_read_rows_several_files_in_order_with_places(folder: Path) -> None:
    rows = list(read_rows([folder / "b.jsonl", folder / "c.csv"], "data.train"))
    assert rows == [
        (f"{folder}/b.jsonl, line 1", {"question": "b.jsonl"}),
        (f"{folder}/c.csv, line 2", {"question": "c.csv"}),
    ]


def test_read_rows_saved_dataset_returns_its_rows() -> None:
    rows = list(read_rows(SAVED, "data.train"))
    assert [row for _, row in rows] == saved_rows()
    assert rows[6][0] == f"{SAVED}, row 7"  # counted over both of its files


def test_read_rows_saved_dataset_selected_columns(tmp_path: Path) -> None:
    shutil.copytree(SAVED, tmp_path / "set")
    overwrite_state(tmp_path / "set", _format_columns=["prompt"])
    assert [row for _, row in read_rows(tmp_path / "set", "data.train")] == [
        {"prompt": row["prompt"]} for row in saved_rows()
    ]


def test_find_files_saved_splits_are_rejected(tmp_path: Path) -> None:
    for split in ("train", "test"):
        shutil.copytree(SAVED, tmp_path / "set" / split)
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match=r"set contains the splits test, train; name one, such as .*set/test"):
        find_files(tmp_path / "set", "data.train")
    assert find_files(tmp_path / "set" / "train", "data.train") == (tmp_path / "set" / "train",)


def overwrite_state(saved: Path, **changes: object) -> None:
    state = json.loads((SAVED / "state.json").read_text())
    (saved / "state.json").write_text(json.dumps(state | changes))


def test_read_rows_damaged_saved_dataset_is_named(tmp_path: Path) -> None:
    def assert_named(message: str) -> None:
        with pytest.raises(DataError, match=rf"^data\.train: .*{message}"):
            list(read_rows(saved, "data.train"))

    saved = Path(shutil.copytree(SAVED, tmp_path / "set"))
    second = saved / "data-00001-of-00002.arrow"
    second.write_bytes(second.read_bytes()[:-600])
    assert_named(r"data-00001-of-00002\.arrow is not a readable file of a saved set \(after row 4\)")
    second.unlink()
    assert_named(r"data-00001-of-00002\.arrow is not a readable file of a saved set \(after row 4\)")
    overwrite_state(saved, _data_files=[1])
    assert_named(r"state\.json does not list files")
    overwrite_state(saved, _indices_data_files=[{"filename": "i.arrow"}])
    assert_named("is a selection saved by an old version")


def test_read_rows_saved_shards_of_several_batches(tmp_path: Path) -> None:
    table = pa.table({"question": [str(i) for i in range(2500)]})
    with pa.ipc.new_stream(tmp_path / "data.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    (tmp_path / "dataset_info.json").write_text("{}")
    assert [row["question"] for _, row in read_rows(tmp_path, "data.train")] == [str(i) for i in range(2500)]


def test_file_weights_match_path_and_glob(folder: Path) -> None:
    names = [f"{folder}/c.csv", f"{folder}/*.jsonl"]
    assert file_weights({}, names) is None
    assert file_weights({f"{folder}/[b-z].jsonl": 0.5}, names) == (1.0, 1.0, 0.5)
    assert file_weights({f"{folder}/*.jsonl": 2, f"{folder}/c.csv": 3}, names) == (3, 2, 2)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"x/d.jsonl": 2}, r"data\.weights: .*d\.jsonl: 2: .* is not in data\.train"),
        ({"nowhere.jsonl": 2}, r"data\.weights: there is no file"),
        ({"a.jsonl": 2, "*.jsonl": 3}, r"a\.jsonl already has a weight from .*a\.jsonl"),
    ],
)
def test_file_weights_unmatched_or_repeated_are_rejected(folder: Path, weights: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        file_weights({f"{folder}/{name}": weight for name, weight in weights.items()}, f"{folder}/*.jsonl")


def test_find_files_name_that_is_not_utf8_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "a\udcff.jsonl").touch()
    for names in (tmp_path, tmp_path / "*.jsonl"):
        with pytest.raises(ConfigError, match=r"^data\.train: .*a\\xff\.jsonl is not UTF-8"):
            find_files(str(names), "data.train")
