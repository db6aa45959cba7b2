"""Sampled responses: bounded reading of rollout files."""

from __future__ import annotations

import json
from pathlib import Path

from mcore_rl.observe.trackers.responses import MAX_CHARACTERS, sample_responses


def write(run_dir: Path, name: str, records: list[dict[str, object]]) -> None:
    path = run_dir / "rollouts" / name
    path.parent.mkdir(exist_ok=True)
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    path.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")


def record(group: int, response: str = "two") -> dict[str, object]:
    facts = {"reward": 1.0, "accuracy": 1.0, "tokens": 3, "finish_reason": "stop", "group": group}
    return {"prompt": "1+1=?", "response": response, **facts}


def test_sample_spreads_over_the_file_and_adds_validation(tmp_path: Path) -> None:
    write(tmp_path, "step_3.jsonl", [record(group) for group in range(8)])
    write(tmp_path, "val_step_3.jsonl", [record(9)])
    found = sample_responses(tmp_path, 3, 4)
    assert [(each.group, each.is_validation) for each in found] == [
        *[(group, False) for group in (0, 2, 4, 6)],
        (9, True),
    ]
    assert (found[0].step, found[0].prompt, found[0].response, found[0].tokens) == (3, "1+1=?", "two", 3)


def test_sample_of_all_lines_has_each_once(tmp_path: Path) -> None:
    write(tmp_path, "step_1.jsonl", [record(group) for group in range(4)])
    assert [each.group for each in sample_responses(tmp_path, 1, 4)] == [0, 1, 2, 3]


def test_sample_of_unequal_lines_repeats_none(tmp_path: Path) -> None:
    write(tmp_path, "step_1.jsonl", [record(0), record(1, "x" * 5000), record(2)])
    groups = [each.group for each in sample_responses(tmp_path, 1, 4)]
    assert groups == sorted(set(groups))


def test_sample_without_file_or_count_is_empty(tmp_path: Path) -> None:
    assert sample_responses(tmp_path, 1, 4) == []
    write(tmp_path, "step_1.jsonl", [record(0)])
    assert sample_responses(tmp_path, 1, 0) == []


def test_sample_shortens_texts_and_escapes_half_surrogates(tmp_path: Path) -> None:
    write(tmp_path, "step_1.jsonl", [record(0, "a" * 50_000 + "\ud83d")])
    (only,) = sample_responses(tmp_path, 1, 1)
    assert len(only.response) < MAX_CHARACTERS + 100
    assert only.response.endswith("\\ud83d")
    only.response.encode("utf-8")


def test_sample_of_incomplete_records_has_defaults(tmp_path: Path) -> None:
    write(tmp_path, "step_1.jsonl", [{"reward": None, "prompt": ["a message"]}])
    (only,) = sample_responses(tmp_path, 1, 1)
    assert (only.reward, only.prompt, only.group) == (0.0, "", 0)
