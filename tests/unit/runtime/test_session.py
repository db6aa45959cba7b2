"""Directories of a local Ray cluster: private, and removed even after a kill."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mcore_rl.runtime.session import MAX_PARENT_CHARACTERS, private_directory, temporary_files
from mcore_rl.weights.transports.hosts import remove_abandoned

DEAD = 4_194_305
"""Above the kernel's largest process id."""


def left_by(parent: Path, pid: int) -> Path:
    directory = parent / f"mcore_rl_{pid}_x"
    (directory / "r" / "sockets").mkdir(parents=True)
    return directory


def test_private_directory_is_private_and_has_room_for_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert len(str(tmp_path)) > MAX_PARENT_CHARACTERS
    with private_directory() as directory:
        assert directory.parent == Path("/tmp")
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        (directory / "r").mkdir()
        socket = directory / "r" / "session_2026-11-22_14-58-42_728515_4194304" / "sockets" / "plasma_store"
        assert len(str(socket)) <= 107
    assert not directory.exists()


def test_remove_abandoned_directories_of_dead_processes_only(tmp_path: Path) -> None:
    left_by(tmp_path, DEAD)
    living = left_by(tmp_path, os.getpid()).name
    for name in ("mcore_rl_slurm_x", f"other_{DEAD}_x", f"mcore_rl_tmp_{DEAD}_x", f"mcore_rl_tmp_{os.getpid()}_x"):
        (tmp_path / name).mkdir()
    remove_abandoned(tmp_path)
    kept = {living, "mcore_rl_slurm_x", f"other_{DEAD}_x", f"mcore_rl_tmp_{os.getpid()}_x"}
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_remove_abandoned_keeps_a_locked_directory(tmp_path: Path) -> None:
    held = left_by(tmp_path, DEAD)
    descriptor = os.open(held, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        remove_abandoned(tmp_path)
        assert held.exists()
    finally:
        os.close(descriptor)
    remove_abandoned(tmp_path)
    assert not held.exists()


@pytest.mark.timeout(30)
def test_remove_abandoned_opens_neither_links_nor_named_pipes(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.mkdir()
    (target / "file").write_text("")
    (tmp_path / f"mcore_rl_{DEAD}_x").symlink_to(target)
    os.mkfifo(tmp_path / f"mcore_rl_{DEAD}_y")
    remove_abandoned(tmp_path)
    assert (target / "file").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a directory of another user")
def test_remove_abandoned_keeps_directories_of_other_users(tmp_path: Path) -> None:
    theirs = left_by(tmp_path, DEAD)
    os.chown(theirs, 12345, 12345)
    remove_abandoned(tmp_path)
    assert theirs.exists()


def test_private_directory_removes_leftovers_of_a_killed_process() -> None:
    code = (
        "import os, signal\n"
        "from mcore_rl.runtime.session import private_directory\n"
        "with private_directory() as directory:\n"
        "    print(directory, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    left = Path(killed.stdout.strip())
    assert left.name.startswith("mcore_rl_")
    assert left.is_dir()
    with private_directory():
        assert not left.exists()


def test_temporary_files_after_the_block_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with temporary_files() as directory:
        assert directory.parent == tmp_path
        assert stat.S_IMODE(directory.stat().st_mode) == (0o711 if os.geteuid() == 0 else 0o700)
        (directory / "vllm_dist_x").touch()
        (directory / "torchinductor_root" / "ab").mkdir(parents=True)
    assert not list(tmp_path.iterdir())
