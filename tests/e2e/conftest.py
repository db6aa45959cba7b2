"""One task and one uninterrupted run of it, shared by all tests here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import train, write_task


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of the configuration of a tiny task."""
    return write_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="session")
def whole_run(task: Path) -> Path:
    """Run directory of a run that nothing interrupted; `exported` beside it holds its final weights."""
    directory = task.parent / "whole"
    output = train(task, directory, f"trainer.export_hf={task.parent / 'exported'}")
    (task.parent / "whole.log").write_text(output)
    return directory
