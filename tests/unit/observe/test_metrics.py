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


def test_append_writes_numpy_and_nan_as_json(tmp_path):
    log = MetricsLog(tmp_path)
    log.append(np.int64(0), {"a": float("nan"), "b": np.float32("-inf"), "c": np.float32(0.5), "d": np.int32(3)})
    assert strict(log.path.read_text()) == {"step": 0, "a": None, "b": None, "c": 0.5, "d": 3}


def test_line_cut_at_any_byte_loses_only_that_line(tmp_path):
    log = log_of(tmp_path)
    content = log.path.read_bytes()
    second_line_ends = len(b"".join(content.splitlines(keepends=True)[:2]))
    for size in range(second_line_ends, len(content)):
        log.path.write_bytes(content[:size])
        assert [record["step"] for record in read_metrics(log.path)] == [0, 1]
        reopened = MetricsLog(tmp_path / "run")
        reopened.append(2, {"again": 1})
        assert [strict(line)["step"] for line in log.path.read_text().splitlines()] == [0, 1, 2]


def test_move_after_keeps_earlier_steps_only(tmp_path):
    log = log_of(tmp_path, steps=6)
    log.append(6, {"actor/loss": float("nan")})
    text = log.path.read_text()
    before = log.read()
    log.move_after(3, tmp_path / "moved.jsonl")
    assert log.read() == before[:4]
    assert read_metrics(tmp_path / "moved.jsonl") == before[4:]
    assert log.path.read_text() + (tmp_path / "moved.jsonl").read_text() == text
    log.append(4, {"reward/mean": 1.0})
    assert [record["step"] for record in log.read()] == [0, 1, 2, 3, 4]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


def test_invalid_record_in_the_middle_raises_with_its_line(tmp_path):
    log = log_of(tmp_path)
    lines = log.path.read_text().splitlines(keepends=True)
    log.path.write_text(lines[0] + "{broken\n" + lines[2])
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2"):
        log.read()


def test_read_without_file_is_empty(tmp_path):
    assert read_metrics(tmp_path / "metrics.jsonl") == []
