"""A checkpoint is complete or absent, whatever interrupts it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rl.errors import CheckpointError
from mcore_rl.trainer.checkpoints import Checkpoints


def write_weights(directory: str) -> None:
    Path(directory, "weights.bin").write_bytes(b"x" * 10)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", keep_last=2)


def test_nothing_is_found_before_the_first(checkpoints: Checkpoints) -> None:
    assert checkpoints.latest() is None


def test_the_last_k_are_kept_and_the_newest_is_found_by_number(checkpoints: Checkpoints) -> None:
    for step in (8, 9, 10):
        checkpoints.save(step, {"step": step}, write_weights)
    assert sorted(p.name for p in checkpoints.directory.iterdir()) == ["step_10", "step_9"]
    step, path = checkpoints.latest() or (0, Path())
    assert (step, checkpoints.read_state(path)) == (10, {"step": 10})
    assert (path / "weights.bin").exists()


def test_a_crash_while_writing_leaves_the_last_good_one(checkpoints: Checkpoints) -> None:
    checkpoints.save(1, {"step": 1}, write_weights)

    def crash(directory: str) -> None:
        write_weights(directory)
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError):
        checkpoints.save(2, {"step": 2}, crash)
    assert (checkpoints.latest() or (0,))[0] == 1
    checkpoints.clean()
    assert [p.name for p in checkpoints.directory.iterdir()] == ["step_1"]


def test_saving_a_step_again_replaces_it(checkpoints: Checkpoints) -> None:
    checkpoints.save(1, {"take": 1}, write_weights)
    path = checkpoints.save(1, {"take": 2}, write_weights)
    assert checkpoints.read_state(path) == {"take": 2}
    assert [p.name for p in checkpoints.directory.iterdir()] == ["step_1"]


def test_a_damaged_state_says_what_to_remove(checkpoints: Checkpoints) -> None:
    path = checkpoints.save(1, {}, write_weights)
    (path / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"remove .*step_1"):
        checkpoints.read_state(path)
