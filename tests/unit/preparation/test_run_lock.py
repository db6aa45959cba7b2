"""Exclusive lock on a run directory: between processes of one host, between hosts, and without the kernel's locks."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from mcore_rl.errors import ConfigError, RunDirLostError
from mcore_rl.preparation import run_dir
from mcore_rl.preparation.run_dir import FILE_NAME, Holder, RunLock, holder_renewal, read_holder

HOLD = """
import sys
from pathlib import Path
from mcore_rl.preparation.run_dir import RunLock
lock = RunLock(Path(sys.argv[1]), print, print)
lock.take()
print("held", flush=True)
sys.stdin.read()
"""


class Lock(RunLock):
    """A lock that records notices and losses."""

    def __init__(self, directory: Path) -> None:
        self.notices: list[str] = []
        self.losses: list[str] = []
        self.lost = threading.Event()
        super().__init__(directory, self.notices.append, self._lose)

    def _lose(self, reason: str) -> None:
        self.losses.append(reason)
        self.lost.set()


def taken_and_released(directory: Path) -> Lock:
    lock = Lock(directory)
    lock.take()
    lock.release()
    return lock


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("SECONDS_BETWEEN_BEATS", 0.05), ("STALE_AFTER_SECONDS", 1.0), ("SECONDS_TO_SETTLE", 0.2)):
        monkeypatch.setattr(run_dir, name, seconds)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds tmp_path."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def elsewhere(directory: Path, age_seconds: float) -> Holder:
    """Record a holder on another host that renewed the file `age_seconds` ago."""
    holder = replace(Holder.this_process(), host="n3", pid=17, job="5", boot="another kernel")
    path = directory / FILE_NAME
    path.write_text(json.dumps(asdict(holder)))
    then = time.time() - age_seconds
    os.utime(path, (then, then))
    return holder


def test_run_lock_held_names_host_pid_and_start(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    holder = read_holder(tmp_path / FILE_NAME)
    assert holder is not None
    with pytest.raises(ConfigError) as raised:
        Lock(tmp_path).take()
    assert holder.pid == other.pid
    for fact in (f"run.dir={tmp_path}", f"process {other.pid} on host {holder.host}", holder.started, "set run.dir"):
        assert fact in str(raised.value)


def test_run_lock_through_a_symlink_is_the_same_lock(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    link = tmp_path.with_name(f"{tmp_path.name}-link")
    link.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match=f"process {other.pid} "):
        Lock(link).take()


def test_run_lock_after_a_killed_holder_is_taken_at_once(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    other.send_signal(signal.SIGKILL)
    other.wait()
    lock = Lock(tmp_path)
    lock.take()
    held = read_holder(tmp_path / FILE_NAME)
    lock.release()
    assert held is not None
    assert held.pid == os.getpid()
    assert not lock.notices


def test_run_lock_after_release_leaves_no_record(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    lock.take()
    lock.take()
    lock.release()
    assert read_holder(tmp_path / FILE_NAME) is None
    taken_and_released(tmp_path)


def test_run_lock_of_a_live_remote_holder_is_refused(tmp_path: Path, fast: None) -> None:
    elsewhere(tmp_path, age_seconds=0)
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.05):
            os.utime(tmp_path / FILE_NAME)

    thread = threading.Thread(target=beat)
    thread.start()
    lock = Lock(tmp_path)
    try:
        with pytest.raises(ConfigError, match=r"process 17 on host n3 \(SLURM job 5\)"):
            lock.take()
    finally:
        stop.set()
        thread.join()
    assert len(lock.notices) == 1


def test_run_lock_of_a_silent_remote_holder_is_taken_after_a_wait(tmp_path: Path, fast: None) -> None:
    elsewhere(tmp_path, age_seconds=0)
    assert "host n3" in taken_and_released(tmp_path).notices[0]


def test_run_lock_of_a_stale_remote_holder_is_taken_at_once(tmp_path: Path) -> None:
    elsewhere(tmp_path, age_seconds=3600)
    assert not taken_and_released(tmp_path).notices


def test_holder_renewal_follows_the_lock(tmp_path: Path) -> None:
    assert holder_renewal(tmp_path) is None
    lock = Lock(tmp_path)
    lock.take()
    os.utime(tmp_path / FILE_NAME, (1000.0, 1000.0))
    assert holder_renewal(tmp_path) == (Holder(**json.loads((tmp_path / FILE_NAME).read_text())).describe(), 1000.0)
    lock.release()
    assert holder_renewal(tmp_path) is None


def test_holder_renewal_of_an_unreadable_record_is_a_holder(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"{")
    os.utime(tmp_path / FILE_NAME, (1000.0, 1000.0))
    assert holder_renewal(tmp_path) == ("a process whose record in run.lock cannot be read", 1000.0)


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"{", b"[]", b'{"host": 1}', b"[" * 10_000])
def test_run_lock_with_a_damaged_record_is_taken(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    taken_and_released(tmp_path)


def test_run_lock_without_kernel_locks_admits_one_of_two(
    tmp_path: Path, fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    locks, outcomes = [Lock(tmp_path), Lock(tmp_path)], []

    def take(lock: Lock) -> None:
        try:
            lock.take()
            outcomes.append("taken")
        except ConfigError:
            outcomes.append("refused")

    threads = [threading.Thread(target=take, args=(lock,)) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for lock in locks:
        lock.release()
    assert sorted(outcomes) == ["refused", "taken"]


@pytest.mark.parametrize("loss", ["deleted", "replaced", "taken"])
def test_run_lock_lost_while_held_is_reported_once(tmp_path: Path, fast: None, loss: str) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    lock = Lock(directory)
    lock.take()
    if loss == "taken":
        elsewhere(directory, age_seconds=0)
    else:
        (directory / FILE_NAME).unlink()
        directory.rmdir()
        if loss == "replaced":
            directory.mkdir()
    assert lock.lost.wait(10)
    time.sleep(0.2)
    lock.release()
    assert len(lock.losses) == 1
    assert ("host n3" if loss == "taken" else "was deleted or replaced") in lock.losses[0]
    if loss == "taken":
        assert read_holder(directory / FILE_NAME) is not None  # the new holder's record stays


def test_run_lock_lost_explains_an_error_of_the_block(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()

    def delete_and_read() -> None:
        shutil.rmtree(directory)
        (directory / "metrics.jsonl").read_text()

    with pytest.raises(RunDirLostError, match="was deleted"), run_dir.run_lock(str(directory), print, print):
        delete_and_read()


def test_run_lock_held_leaves_errors_of_the_block_alone(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), run_dir.run_lock(str(tmp_path), print, print):
        (tmp_path / "metrics.jsonl").read_text()
