"""A task and an uninterrupted run of it, shared by all tests of this folder, also between test processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from filelock import FileLock

from tests.e2e.runs import train, write_task


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Directory that all test processes share."""
    own = tmp_path_factory.getbasetemp()
    return own if worker_id == "master" else own.parent


@pytest.fixture(scope="session")
def task(shared: Path) -> Path:
    """Path of the configuration of a tiny task."""
    with FileLock(shared / "task.lock"):
        done = shared / "task" / "config.yaml"  # written last
        if not done.exists():
            done.parent.mkdir()
            write_task(done.parent)
    return done


@pytest.fixture(scope="session")
def whole_run(task: Path) -> Path:
    """Run directory of a run that nothing interrupted. Beside it: `exported` with its final weights, its output
    `whole.log`, and its TMPDIR `temporary`."""
    directory, output, temporary = (task.parent / name for name in ("whole", "whole.log", "temporary"))
    with FileLock(task.parent / "whole.lock"):
        if not output.exists():
            temporary.mkdir()
            export = f"trainer.export_hf={task.parent / 'exported'}"
            # For test_debugging, which repeats a step.
            kept = "observe.keep_trajectories=3"
            output.write_text(train(task, directory, export, kept, TMPDIR=str(temporary)))
    return directory
