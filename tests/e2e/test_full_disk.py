"""A disk that fills up during a run: one message, the checkpoints before it intact."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.runs import TrainProcess, metrics

pytestmark = pytest.mark.slow


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Room for a checkpoint or two of the tiny model, where this machine lets us mount a file system."""
    directory = tmp_path / "small"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(directory)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("cannot mount a file system here")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


def test_a_disk_that_fills_up_ends_the_run_with_one_message(task: Path, small_disk: Path, tmp_path: Path) -> None:
    run_dir = small_disk / "run"
    with TrainProcess(task, run_dir, ("checkpoint.every_steps=1", "checkpoint.keep_last=9"), log_dir=tmp_path) as run:
        assert run.finish() == 2, run.text()[-4000:]
        error = [line for line in run.text().splitlines() if line.startswith("error:")]
        assert len(error) == 1
        assert "run.dir" in error[0]
        assert "No space left" in error[0]
        assert "Traceback" not in run.text()
        assert not run.left_after(30)
    kept = [path.name for path in (run_dir / "checkpoints").iterdir() if not path.name.startswith(".")]
    assert kept
    assert all((run_dir / "checkpoints" / name / "state.json").exists() for name in kept)
    assert metrics(run_dir)
