"""Control groups of sandboxes, whatever holds them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from mcore_rl.sandbox.confinement import memory
from mcore_rl.sandbox.confinement.memory import ControlGroup


@pytest.fixture
def parent() -> Path:
    parent = memory._parent_group()
    if parent is None:
        pytest.skip("no control groups can be made here")
    return parent


def test_busy_group_is_removed_with_the_next_group(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_REMOVAL_SECONDS", 0.05)
    group = ControlGroup(parent, 1 << 30)
    (group._path / "held").mkdir()  # as processes do that are being killed
    started = time.monotonic()
    group.close()
    assert time.monotonic() - started >= 0.05
    assert group._path.exists()
    (group._path / "held").rmdir()
    following = ControlGroup(parent, 1 << 30)
    assert not group._path.exists()
    following.close()
    assert not following._path.exists()
    assert not memory._busy_groups


def test_groups_of_killed_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_candidates", lambda: [tmp_path])
    dead, living, foreign = (tmp_path / f"{memory.PREFIX}{name}" for name in ("4194305_0", f"{os.getpid()}_0", "x"))
    with memory.groups_removed():
        for group in (dead, living, foreign):
            group.mkdir()
    assert [group.exists() for group in (dead, living, foreign)] == [False, True, True]
