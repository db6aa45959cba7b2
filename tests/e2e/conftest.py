"""A task and an uninterrupted run of it, shared by all tests of this folder."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Makes a file system of the given size ("64k"), where this machine lets us mount one."""
    directory = tmp_path / "small"

    def mount(size: str) -> Path:
        directory.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("cannot mount a file system here")
        return directory

    yield mount
    if directory.is_mount():
        subprocess.run(["umount", "-l", str(directory)], check=True)
