"""Folders of weight files: new for every start and connection, and removed at the end, also after a kill."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from mcore_rl.errors import StorageError
from mcore_rl.remote.shared_folder import SharedFolder
from mcore_rl.weights.transports.files.run_files import RECORD, RunFiles, run_files

BUCKET = "memory://bucket/weights"


def test_begin_connection_removes_the_earlier_one(tmp_path: Path) -> None:
    files = RunFiles(f"{tmp_path}/run")
    first = files.begin_connection(1)
    second = files.begin_connection(2)
    assert (Path(first).exists(), Path(second).exists()) == (False, True)


@pytest.mark.parametrize("url", ["directory", BUCKET])
def test_run_files_are_removed_at_the_end_and_after_a_kill(url: str, tmp_path: Path, bucket: MemoryFileSystem) -> None:
    run_dir, other = tmp_path / "run", tmp_path / "other"
    run_dir.mkdir()
    other.mkdir()
    directory = url if "://" in url else str(tmp_path / url)

    def exists(folder: str) -> bool:
        return bool(bucket.exists(folder)) if "://" in folder else Path(folder).exists()

    killed = run_files(directory, run_dir)  # the block never ends
    left = killed.__enter__().begin_connection(1)
    with run_files(directory, other) as files:
        beside = files.begin_connection(1)
        with run_files(directory, run_dir) as again:
            assert not exists(left)
            assert exists(beside)
            begun = again.begin_connection(1)
            assert exists(begun)
        assert not exists(begun)
        assert exists(beside)
    assert not exists(beside)
    assert not (run_dir / RECORD).exists()


def test_run_files_that_cannot_be_removed_stay_in_the_record(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    unreachable, record = "unknown-protocol://bucket/run", tmp_path / RECORD
    left = tmp_path / "left"
    left.mkdir()
    record.write_text(json.dumps({"folders": [unreachable, str(left)]}))
    with run_files(str(tmp_path / "weights"), tmp_path) as files:
        files.begin_connection(1)
        assert json.loads(record.read_text()) == {"folders": [unreachable, str(left), files.url]}
        assert not left.exists()
    assert "were not removed: weights.directory=unknown-protocol://bucket/run" in caplog.text
    assert json.loads(record.read_text()) == {"folders": [unreachable]}


def test_files_that_a_killed_start_writes_late_are_removed_at_the_end(tmp_path: Path, bucket: MemoryFileSystem) -> None:
    killed = run_files(BUCKET, tmp_path)  # the block never ends
    late = killed.__enter__().begin_connection(1)
    with run_files(BUCKET, tmp_path):
        assert not bucket.exists(late)
        SharedFolder("weights.directory", late).put("0/0.0.weights.0", memoryview(b"late"))
    assert not bucket.find("/bucket")


def test_connection_that_cannot_be_removed_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: SharedFolder) -> None:
        raise StorageError(f"weights.directory: {folder.url}: OSError: Directory not empty")

    files = RunFiles(f"{tmp_path}/run")
    files.begin_connection(1)
    monkeypatch.setattr(SharedFolder, "remove_all", refuse)
    second = files.begin_connection(2)
    assert Path(second).is_dir()
    assert "weights of an earlier connection were not removed: weights.directory: " in caplog.text


def test_damaged_record_of_run_files_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    record = tmp_path / RECORD
    record.write_text("{")
    with run_files(str(tmp_path / "weights"), tmp_path) as files:
        assert json.loads(record.read_text()) == {"folders": [files.url]}
    assert "is damaged" in caplog.text
    assert not record.exists()
