"""A checkpoint is either complete or absent after any interruption, and its proof shows which."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest
import torch

from mcore_rl.errors import CheckpointError, DamagedCheckpointError
from mcore_rl.trainer import proof as proof_module
from mcore_rl.trainer.checkpoints import Checkpoints, JoinedSave, check_newest, split_files
from mcore_rl.types import SavedFile, SavedState

WEIGHTS = b"x" * 10


@dataclass
class Ranks:
    """Ranks that write their files in `result`, or raise `fails`."""

    directory: Path
    fails: Exception | None = None
    finished: bool = True

    def done(self) -> bool:
        return self.finished

    def result(self) -> SavedState:
        (self.directory / "weights.bin").write_bytes(WEIGHTS)
        if self.fails is not None:
            raise self.fails
        return SavedState((SavedFile("weights.bin", len(WEIGHTS), crc32(WEIGHTS)),), {"world_size": 2})


def start(directory: str) -> Ranks:
    return Ranks(Path(directory))


def names(checkpoints: Checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.directory.iterdir())


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", keep_last=2)


def test_save_keeps_the_last_k_by_number(checkpoints: Checkpoints) -> None:
    for step in (8, 9, 10):
        checkpoints.save(step, {"step": step}, start)
    assert names(checkpoints) == ["step_10", "step_9"]
    step, path = checkpoints.latest() or (0, Path())
    assert (step, checkpoints.read(path)[0]) == (10, {"step": 10})
    assert (path / "weights.bin").exists()


def test_save_keeps_the_best_and_the_last(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last=1, keep_best=2)
    checkpoints.save(0, {}, start)  # without an accuracy, which is less than any
    accuracies = {1: 0.5, 2: 0.7, 3: None, 4: 0.5, 5: 0.7, 6: 0.1, 7: 0.6}
    for step in list(accuracies)[:5]:
        checkpoints.save(step, {"accuracy": accuracies[step]}, start)
    assert names(checkpoints) == ["step_2", "step_5"]
    resumed = Checkpoints(tmp_path / "checkpoints", keep_last=1, keep_best=1)
    resumed.save(6, {"accuracy": accuracies[6]}, start)
    assert names(resumed) == ["step_2", "step_6"]  # of two equally good ones, the earlier
    resumed.save(7, {"accuracy": accuracies[7]}, start, wait=False)
    resumed.settle()
    assert names(resumed) == ["step_2", "step_7"]


def test_save_with_damaged_older_checkpoint_succeeds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last=2, keep_best=1)
    checkpoints.save(1, {"accuracy": 0.5}, start)
    state = checkpoints.directory / "step_1" / "state.json"
    state.write_text(state.read_text().replace("0.5", "0.9"))
    checkpoints.save(2, {"accuracy": 0.1}, start)
    assert names(checkpoints) == ["step_1", "step_2"]
    assert "step_1 is damaged: state.json has another checksum" in caplog.text


def test_write_proof_lists_files_and_description(checkpoints: Checkpoints) -> None:
    checkpoints.save(1, {}, start)
    proof = json.loads((checkpoints.directory / "step_1" / "complete.json").read_text())
    assert proof["files"]["weights.bin"] == {"bytes": 10, "crc32": f"{crc32(WEIGHTS):08x}"}
    assert set(proof["files"]) == {"weights.bin", "state.json"}
    assert proof["world_size"] == 2


def test_save_crash_keeps_the_previous_checkpoint(checkpoints: Checkpoints) -> None:
    checkpoints.save(1, {"step": 1}, start)
    with pytest.raises(RuntimeError):
        checkpoints.save(2, {"step": 2}, lambda directory: Ranks(Path(directory), RuntimeError("power cut")))
    assert (checkpoints.latest() or (0,))[0] == 1
    checkpoints.clean()
    assert names(checkpoints) == ["step_1"]


def test_save_existing_step_is_skipped(checkpoints: Checkpoints) -> None:
    checkpoints.save(1, {"take": 1}, start)
    checkpoints.save(1, {"take": 2}, start)
    assert checkpoints.read(checkpoints.directory / "step_1")[0] == {"take": 1}


@pytest.mark.parametrize("lacking", ["complete.json", "weights.bin"])
def test_save_incomplete_step_is_saved_again(checkpoints: Checkpoints, lacking: str) -> None:
    checkpoints.save(1, {"take": 1}, start)
    (checkpoints.directory / "step_1" / lacking).unlink()
    checkpoints.save(1, {"take": 2}, start)
    assert checkpoints.read(checkpoints.directory / "step_1")[0] == {"take": 2}
    assert names(checkpoints) == ["step_1"]


def test_save_async_is_valid_after_all_ranks(checkpoints: Checkpoints) -> None:
    ranks: list[Ranks] = []

    def begin(directory: str) -> Ranks:
        ranks.append(Ranks(Path(directory), finished=False))
        return ranks[-1]

    checkpoints.save(1, {}, begin, wait=False)
    checkpoints.poll()
    assert names(checkpoints) == [".step_1.partial"]
    assert checkpoints.latest() is None
    ranks[0].finished = True
    checkpoints.poll()
    assert names(checkpoints) == ["step_1"]


def test_save_second_waits_and_raises_errors_of_the_first(checkpoints: Checkpoints) -> None:
    begun: list[int] = []

    def begin(step: int, fails: Exception | None = None) -> Callable[[str], Ranks]:
        def started(directory: str) -> Ranks:
            begun.append(step)
            return Ranks(Path(directory), fails, finished=False)

        return started

    checkpoints.save(1, {}, begin(1), wait=False)
    checkpoints.save(2, {}, begin(2, CheckpointError("__0_0.distcp could not be written")), wait=False)
    assert names(checkpoints) == [".step_2.partial", "step_1"]
    with pytest.raises(CheckpointError, match="__0_0"):
        checkpoints.save(3, {}, begin(3), wait=False)
    assert begun == [1, 2]
    checkpoints.settle()  # the failure has already been raised
    assert (checkpoints.latest() or (0,))[0] == 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "weights.bin").unlink(), "weights.bin is missing"),
        (lambda path: (path / "weights.bin").write_bytes(b"x"), "weights.bin has 1 of 10 bytes"),
        (lambda path: (path / "complete.json").write_text("{"), "complete.json cannot be read"),
        (lambda path: (path / "complete.json").write_text("[]"), "complete.json cannot be read"),
        (lambda path: (path / "complete.json").write_text("[" * 100_000), "complete.json cannot be read"),
        (lambda path: (path / "complete.json").write_bytes(b'{"a": "\xe9"}'), "complete.json cannot be read"),
        (lambda path: (path / "complete.json").write_text('{"files": {}}'), r"does not list state\.json"),
        (lambda path: rewrite(path, '"bytes": 10', '"bytes": "x"'), "another checksum than was saved"),
        (lambda path: rewrite(path, '"bytes": 10', '"bytes": 1e999'), "another checksum than was saved"),
        (lambda path: rewrite(path, '"world_size": 2', '"world_size": 4'), "another checksum than was saved"),
        (lambda path: rewrite(path, "weights.bin", "weights.bim"), "another checksum than was saved"),
        (lambda path: rewrite(path, "weights.bin", "../weights.bin", resealed=True), r"it lists \.\./weights\.bin"),
        (lambda path: rewrite(path, '"files"', '"filed"', resealed=True), "complete.json cannot be read"),
        (lambda path: ((path / "complete.json").unlink(), (path / "complete.json").mkdir()), "not a regular file"),
        (lambda path: ((path / "complete.json").unlink(), os.mkfifo(path / "complete.json")), "not a regular file"),
    ],
)
def test_latest_damaged_checkpoint_names_the_remedy(
    checkpoints: Checkpoints, damage: Callable[[Path], object], message: str
) -> None:
    """It is not skipped: resuming from the previous one would silently lose steps."""
    for step in (1, 2):
        checkpoints.save(step, {}, start)
    damage(checkpoints.directory / "step_2")
    with pytest.raises(DamagedCheckpointError, match=message) as caught:
        checkpoints.latest()
    assert str(caught.value).endswith("; step_1 is complete: remove step_2 to resume from it")
    damage(checkpoints.directory / "step_1")
    with pytest.raises(DamagedCheckpointError, match=r"there is no older one: remove step_2 to start over"):
        checkpoints.latest()


def rewrite(checkpoint: Path, old: str, new: str, *, resealed: bool = False) -> None:
    """Change complete.json. `resealed`: without a checksum, like proofs of earlier versions."""
    proof = checkpoint / "complete.json"
    text = proof.read_text().replace(old, new, 1)
    assert text != proof.read_text()
    proof.write_text(re.sub(r',\s*"crc32": "[0-9a-f]{8}"\s*}\s*$', "}", text) if resealed else text)


@pytest.mark.parametrize("name", ["weights.bin", "state.json"])
def test_check_newest_finds_changed_bytes_before_the_start(checkpoints: Checkpoints, name: str) -> None:
    for step in (1, 2):
        checkpoints.save(step, {"step": step}, start)
    check_newest(checkpoints.directory.parent)
    path = checkpoints.directory / "step_2" / name
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(DamagedCheckpointError, match=f"step_2 is damaged: {name} has another checksum") as caught:
        check_newest(checkpoints.directory.parent)
    assert str(caught.value).endswith("; step_1 is complete: remove step_2 to resume from it")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("damage", ["first", "last", "middle"])
def test_check_newest_reads_both_ends_of_large_files(
    checkpoints: Checkpoints, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks compare the middle, which they read anyway."""
    blocks = io.BytesIO()
    for seed in range(2):
        torch.save(torch.full((1000,), seed), blocks)
    data = blocks.getvalue()

    class Writer(Ranks):
        def result(self) -> SavedState:
            (self.directory / "__0_0.distcp").write_bytes(data)
            return SavedState((SavedFile("__0_0.distcp", len(data), crc32(data)),), {})

    checkpoints.save(1, {}, lambda directory: Writer(Path(directory)))
    monkeypatch.setattr(proof_module, "CHECKED_BYTES", 0)
    monkeypatch.setattr(proof_module, "_SMALL_BYTES", 100)
    check_newest(checkpoints.directory.parent)
    place = {"first": 0, "last": len(data) - 4096, "middle": len(data) // 4}[damage]
    zeroed = data[:place] + bytes(4096) + data[place + 4096 :]
    (checkpoints.directory / "step_1" / "__0_0.distcp").write_bytes(zeroed)
    if damage == "middle":
        check_newest(checkpoints.directory.parent)
        return
    with pytest.raises(DamagedCheckpointError, match=r"__0_0\.distcp does not begin and end like a zip archive"):
        check_newest(checkpoints.directory.parent)


def test_latest_directory_without_proof_is_skipped(checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints.save(1, {}, start)
    half = checkpoints.directory / "step_2"
    half.mkdir()
    (half / "weights.bin").write_bytes(WEIGHTS)
    assert (checkpoints.latest() or (0,))[0] == 1
    assert "step_2" in caplog.text
    (checkpoints.directory / "step_1" / "complete.json").unlink()
    with pytest.raises(CheckpointError, match="none of step_1, step_2 is complete"):
        checkpoints.latest()


ACTOR = (SavedFile("a.distcp", 3, 1), SavedFile("hf/config.json", 2, 5))
CRITIC = (SavedFile("a.distcp", 4, 2), SavedFile("hf/config.json", 2, 6))


def part(files: tuple[SavedFile, ...], *, is_done: bool = True) -> Any:
    return SimpleNamespace(done=lambda: is_done, result=lambda: SavedState(files, {"tensors": len(files)}))


def test_joined_save_file_names_round_trip() -> None:
    saved = JoinedSave({"": part(ACTOR), "critic": part(CRITIC)}).result()
    assert [file.name for file in saved.files][2:] == ["critic/a.distcp", "critic/hf/config.json"]
    assert saved.description == {"tensors": 2, "critic": {"tensors": 2}}
    own, critics = split_files(saved.files, "critic")
    assert (tuple(own), tuple(critics)) == (ACTOR, CRITIC)


def test_split_files_similar_directory_name_is_not_matched() -> None:
    own, critics = split_files([SavedFile("critics.json", 1, 1)], "critic")
    assert (len(own), critics) == (1, [])


def test_joined_save_is_done_when_all_parts_are() -> None:
    assert JoinedSave({"": part(ACTOR), "critic": part(CRITIC)}).done()
    assert not JoinedSave({"": part(ACTOR), "critic": part(CRITIC, is_done=False)}).done()
