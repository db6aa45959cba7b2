import json

import numpy as np
import pytest

from mcore_rl.errors import DataError
from mcore_rl.observe.metrics import MetricsLog, read_metrics


def log_of(tmp_path, steps=3):
    log = MetricsLog(tmp_path / "run")
    for step in range(steps):
        log.append(step, {"reward/mean": step / 10})
    return log


def strict(text):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_values_that_json_does_not_know_are_written_as_json(tmp_path):
    log = MetricsLog(tmp_path)
    log.append(
        np.int64(0), {"a": float("nan"), "b": np.float32("-inf"), "c": np.float32(0.5), "d": np.int32(3), "e": "x"}
    )
    assert strict(log.path.read_text()) == {"step": 0, "a": None, "b": None, "c": 0.5, "d": 3, "e": "x"}


def test_a_reopened_log_goes_on(tmp_path):
    log_of(tmp_path)
    log = MetricsLog(tmp_path / "run")
    log.append(3, {})
    assert [record["step"] for record in log.read()] == [0, 1, 2, 3]


def test_a_line_torn_at_any_byte_costs_that_line_only(tmp_path):
    log = log_of(tmp_path)
    content = log.path.read_bytes()
    second_line_ends = len(b"".join(content.splitlines(keepends=True)[:2]))
    for size in range(second_line_ends, len(content)):
        log.path.write_bytes(content[:size])
        assert [record["step"] for record in read_metrics(log.path)] == [0, 1]
        reopened = MetricsLog(tmp_path / "run")
        reopened.append(2, {"again": 1})
        assert [strict(line)["step"] for line in log.path.read_text().splitlines()] == [0, 1, 2]


def test_moving_keeps_up_to_the_step_and_leaves_nothing_else_behind(tmp_path):
    log = log_of(tmp_path, steps=6)
    before = log.read()
    log.move_after(3, tmp_path / "moved.jsonl")
    assert log.read() == before[:4]
    assert read_metrics(tmp_path / "moved.jsonl") == before[4:]
    assert not log.holds_after(3)
    log.append(4, {"reward/mean": 1.0})
    assert [record["step"] for record in log.read()] == [0, 1, 2, 3, 4]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


def test_nothing_to_move_makes_no_file(tmp_path):
    log = log_of(tmp_path)
    log.move_after(2, tmp_path / "moved.jsonl")
    assert not (tmp_path / "moved.jsonl").exists()


def test_damage_in_the_middle_is_named_not_skipped(tmp_path):
    log = log_of(tmp_path)
    lines = log.path.read_text().splitlines(keepends=True)
    log.path.write_text(lines[0] + "{broken\n" + lines[2])
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2"):
        log.read()


def test_no_file_is_no_record(tmp_path):
    assert read_metrics(tmp_path / "metrics.jsonl") == []
