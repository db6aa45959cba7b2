import shutil
import sys
import threading
from contextlib import closing

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mcore_rl.observe.tensorboard import TensorBoardLog


def read(directory):
    """Read the scalars as TensorBoard does: {tag: [(step, value)]}."""
    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    return {
        tag: [(event.step, pytest.approx(event.value)) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def test_tensorboard_reads_written_scalars(tmp_path):
    with closing(TensorBoardLog(tmp_path)) as log:
        log.append(0, {"reward/mean": np.float32(0.25), "step": 0, "bad": float("nan")})
        log.append(1, {"reward/mean": 0.5})
        assert read(tmp_path)["reward/mean"] == [(0, 0.25), (1, 0.5)]  # on disk before close
    assert set(read(tmp_path)) == {"reward/mean", "step"}


def test_tensorboard_resume_replaces_repeated_steps(tmp_path, monkeypatch):
    with closing(TensorBoardLog(tmp_path)) as log:
        for step in range(5):
            log.append(step, {"loss": step})
    with closing(TensorBoardLog(tmp_path, purge_step=3)) as log:
        log.append(3, {"loss": 30})
        log.append(4, {"loss": 40})
    assert read(tmp_path)["loss"] == [(0, 0), (1, 1), (2, 2), (3, 30), (4, 40)]


def test_tensorboard_log_needs_no_tensorflow(tmp_path):
    TensorBoardLog(tmp_path).close()
    assert "tensorflow" not in sys.modules


def test_tensorboard_log_deleted_directory_raises_nothing(tmp_path, capfd):
    threads = threading.active_count()
    with closing(TensorBoardLog(tmp_path / "log")) as log:
        assert threading.active_count() == threads  # a thread of the writer would print a traceback
        shutil.rmtree(tmp_path / "log")
        log.append(1, {"loss": 1.0})
    assert not capfd.readouterr().err
