"""Copies of checkpoints: they equal the checkpoints, a cut one is never read, and a start without any resumes from
them."""

from __future__ import annotations

from pathlib import Path
from zlib import crc32

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from mcore_rl.errors import ConfigError, DamagedCheckpointError, DataError, StorageError
from mcore_rl.trainer.checkpoints import Checkpoints, CheckpointState
from mcore_rl.trainer.copies import (
    LOG,
    CheckpointCopies,
    check_copies,
    copied_steps,
    copy_all,
    fetch_newest,
    mirror_at,
)
from mcore_rl.types import SavedFile, SavedState

URL = "memory://bucket/run"


class Ranks:
    """Ranks whose save of `weights` is complete."""

    def __init__(self, directory: Path, weights: bytes) -> None:
        self.directory, self.weights = directory, weights

    def done(self) -> bool:
        return True

    def result(self) -> SavedState:
        (self.directory / "critic").mkdir()
        (self.directory / "critic" / "w.bin").write_bytes(self.weights)
        return SavedState((SavedFile("critic/w.bin", len(self.weights), crc32(self.weights)),), {})


def save(checkpoints: Checkpoints, step: int, weights: bytes = b"w") -> None:
    state: CheckpointState = {"step": step, "version": step, "accuracy": None, "positions": {}}
    checkpoints.save(step, state, lambda directory: Ranks(Path(directory), weights))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "run" / "checkpoints", keep_last=2)


def test_copy_all_mirrors_the_kept_checkpoints(checkpoints: Checkpoints, bucket: MemoryFileSystem) -> None:
    for step in (1, 2):
        save(checkpoints, step)
    copy_all(URL, checkpoints.directory)
    assert copied_steps(URL) == [1, 2]
    # Folders of others stay.
    bucket.pipe_file("/bucket/run/notes/complete.json", b"{}")
    for step in (9, 10):
        save(checkpoints, step)
    copy_all(URL, checkpoints.directory)
    assert copied_steps(URL) == [9, 10]
    files = ("complete.json", "critic/w.bin", "state.json")
    copied = {f"/bucket/run/step_{step}/{name}" for step in (9, 10) for name in files}
    assert set(bucket.find("/bucket/run")) == copied | {"/bucket/run/notes/complete.json"}


def test_copy_all_replaces_a_copy_with_other_content(
    checkpoints: Checkpoints, bucket: MemoryFileSystem, tmp_path: Path
) -> None:
    save(Checkpoints(tmp_path / "other", keep_last=1), 1, b"other")
    copy_all(URL, tmp_path / "other")
    save(checkpoints, 1, b"mine")
    copy_all(URL, checkpoints.directory)
    assert bucket.cat_file("/bucket/run/step_1/critic/w.bin") == b"mine"


def test_upload_that_is_cut_is_not_a_copy(
    checkpoints: Checkpoints, bucket: MemoryFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(Checkpoints(tmp_path / "other", keep_last=1), 1, b"other")
    copy_all(URL, tmp_path / "other")
    save(checkpoints, 1)
    put = MemoryFileSystem.put_file

    def cut(self: MemoryFileSystem, source: str, target: str) -> None:
        if target.endswith("w.bin"):
            raise PermissionError("access denied")
        put(self, source, target)

    with monkeypatch.context() as patched:
        patched.setattr(MemoryFileSystem, "put_file", cut)
        with pytest.raises(StorageError, match="PermissionError: access denied"):
            copy_all(URL, checkpoints.directory)
    # The earlier copy of this name is incomplete, and the files of both must not be mixed.
    assert copied_steps(URL) == []
    copy_all(URL, checkpoints.directory)
    assert copied_steps(URL) == [1]


def test_fetch_newest_restores_all_bytes(checkpoints: Checkpoints, bucket: MemoryFileSystem, tmp_path: Path) -> None:
    for step in (9, 10):
        save(checkpoints, step, b"%d" % step)
    copy_all(URL, checkpoints.directory)
    lines: list[str] = []
    fetch_newest(URL, tmp_path / "new", lines.append)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["step_10"]
    assert contents(tmp_path / "new" / "step_10") == contents(checkpoints.directory / "step_10")
    assert lines == [f"checkpoint.copy_to: fetching step_10 from {URL}"]
    # With a checkpoint, nothing is fetched.
    fetch_newest(URL, checkpoints.directory, lines.append)
    assert len(lines) == 1


@pytest.mark.parametrize("name", ["critic/w.bin", "complete.json"])
def test_fetch_newest_of_a_damaged_copy_leaves_no_checkpoint(
    name: str, checkpoints: Checkpoints, bucket: MemoryFileSystem, tmp_path: Path
) -> None:
    save(checkpoints, 3)
    copy_all(URL, checkpoints.directory)
    bucket.pipe_file(f"/bucket/run/step_3/{name}", b"cut")
    with pytest.raises(DamagedCheckpointError, match="step_3"):
        fetch_newest(URL, tmp_path / "new", lambda line: None)
    assert Checkpoints(tmp_path / "new", keep_last=1).latest() is None


def test_fetch_rejects_names_outside(bucket: MemoryFileSystem, tmp_path: Path) -> None:
    bucket.store["/bucket/run/step_1/../x"] = bucket.open("/bucket/run/step_1/complete.json", "wb")
    with pytest.raises(DataError, match="is outside"):
        mirror_at(URL).fetch("step_1", tmp_path / "new")
    assert not (tmp_path / "x").exists()


def test_check_copies_newer_than_the_run_are_rejected(
    checkpoints: Checkpoints, bucket: MemoryFileSystem, tmp_path: Path
) -> None:
    check_copies(URL, checkpoints.directory)
    save(checkpoints, 4)
    copy_all(URL, checkpoints.directory)
    check_copies(URL, checkpoints.directory)
    check_copies(URL, tmp_path / "new")
    save(earlier := Checkpoints(tmp_path / "earlier", keep_last=1), 2)
    with pytest.raises(ConfigError, match=r"^checkpoint\.copy_to=memory.* step 4, but the newest in .* is of step 2; "):
        check_copies(URL, earlier.directory)


def test_check_copies_unreachable_address_is_one_message(tmp_path: Path) -> None:
    for url in ("foo://x", "s3://no-bucket-here/run"):
        with pytest.raises(ConfigError, match=rf"^checkpoint\.copy_to={url}: "):
            check_copies(url, tmp_path)


def test_copied_waits_for_the_last_save(checkpoints: Checkpoints, tmp_path: Path) -> None:
    target = tmp_path / "copies"
    checkpoints.copier = CheckpointCopies(str(target), checkpoints.directory, tmp_path)
    with checkpoints.copied():
        save(checkpoints, 1)
        save(checkpoints, 2)
    assert copied_steps(str(target)) == [1, 2]
    assert contents(target / "step_2") == contents(checkpoints.directory / "step_2")
    assert (tmp_path / LOG).read_text() == ""


def test_copied_failure_ends_in_one_message_and_keeps_checkpoints(checkpoints: Checkpoints, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    target = tmp_path / "file" / "copies"
    checkpoints.copier = CheckpointCopies(str(target), checkpoints.directory, tmp_path)
    save(checkpoints, 1)
    with pytest.raises(StorageError, match=rf"are not copied: checkpoint\.copy_to={target}: .*Not a directory"):
        checkpoints.copier.finish()
    assert checkpoints.latest() is not None


def test_copied_error_of_the_block_ends_the_copy(checkpoints: Checkpoints, tmp_path: Path) -> None:
    copier = CheckpointCopies(str(tmp_path / "copies"), checkpoints.directory, tmp_path)
    checkpoints.copier = copier
    save(checkpoints, 1)
    assert copier._process is not None
    with pytest.raises(ValueError, match="a rank died"), checkpoints.copied():
        raise ValueError("a rank died")
    assert copier._process is None
