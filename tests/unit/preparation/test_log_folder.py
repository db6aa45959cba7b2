"""Folder for the output of one start of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rl.errors import ConfigError
from mcore_rl.preparation.run_dir import make_log_folder


def test_make_log_folder_numbers_each_start(tmp_path: Path) -> None:
    first = make_log_folder(tmp_path)
    (first / "driver.log").touch()
    assert make_log_folder(tmp_path) == tmp_path / "logs" / "attempt_2"
    assert [path.name for path in first.iterdir()] == ["driver.log"]


def test_make_log_folder_orders_numbers_and_skips_other_files(tmp_path: Path) -> None:
    for name in ("attempt_9", "attempt_10", "attempt_old"):
        (tmp_path / "logs" / name).mkdir(parents=True)
    (tmp_path / "logs" / "driver.log").touch()  # of a version without attempts
    assert make_log_folder(tmp_path).name == "attempt_11"


def test_make_log_folder_that_cannot_be_written_names_run_dir(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    with pytest.raises(ConfigError, match=rf"run\.dir={tmp_path} cannot be written"):
        make_log_folder(tmp_path)
