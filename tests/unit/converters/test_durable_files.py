"""Atomic and durable writes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from model_converters.durable_files import durable_write


def test_durable_write_replaces_the_file_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with durable_write(path, mode=0o600) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["x"]


def test_durable_write_keeps_what_is_not_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # instead of a device, such as /dev/null, which a defect would replace
    with pytest.raises(FileExistsError, match="not a file"), durable_write(tmp_path / "pipe"):
        raise AssertionError("not reached")
    assert (tmp_path / "pipe").is_fifo()
    assert os.listdir(tmp_path) == ["pipe"]


def test_durable_write_that_raises_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")

    def write() -> None:
        with durable_write(path) as file:
            file.write(b"half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]
