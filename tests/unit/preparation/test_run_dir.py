"""Checks of a run directory that a dry run makes before the directory exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rl.errors import ConfigError
from mcore_rl.preparation.run_dir import check_can_create


def test_check_can_create_missing_directory_is_not_created(tmp_path: Path) -> None:
    check_can_create(tmp_path / "runs" / "new", 0)
    assert list(tmp_path.iterdir()) == []


def test_check_can_create_measures_the_disk_of_the_parent(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "new"
    with pytest.raises(ConfigError, match=rf"^run\.dir={directory}: \d+ MiB free, but one checkpoint needs about"):
        check_can_create(directory, 1 << 60)


def test_check_can_create_relative_path_starts_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_can_create(Path("runs/new"), 0)


def test_check_can_create_below_a_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be written: Not a directory; set run\.dir to another place"):
        check_can_create(tmp_path / "file" / "run", 0)
