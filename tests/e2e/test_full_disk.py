"""A disk that fills up during a run: one error message, and earlier checkpoints stay intact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.runs import SUPERVISED, TrainProcess, metrics

pytestmark = pytest.mark.slow


def test_a_disk_that_fills_up_ends_the_run_with_one_message(
    task: Path, small_disk: Callable[[str], Path], tmp_path: Path
) -> None:
    run_dir = small_disk("5m") / "run"  # room for a checkpoint or two of the tiny model
    with TrainProcess(
        task, run_dir, (*SUPERVISED, "checkpoint.every_steps=1", "checkpoint.keep_last=9"), log_dir=tmp_path
    ) as run:
        assert run.finish() == 2, run.text()[-4000:]
        error = [line for line in run.text().splitlines() if line.startswith("error:")]
        assert len(error) == 1
        assert "run.dir" in error[0]
        assert "No space left" in error[0]
        assert "Traceback" not in run.text()
        assert not run.left_after(30)
    kept = [path.name for path in (run_dir / "checkpoints").iterdir()]
    assert kept
    assert not [name for name in kept if name.startswith(".")]  # the partial checkpoint is gone
    assert all((run_dir / "checkpoints" / name / "state.json").exists() for name in kept)
    assert metrics(run_dir)
