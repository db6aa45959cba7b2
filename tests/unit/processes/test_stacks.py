"""Processes write their stacks on request, also while they are blocked, and their children too."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from mcore_rl.processes.child import Child
from mcore_rl.processes.stack_requests import request_stacks
from mcore_rl.processes.stacks import SIGNAL, VARIABLE, handles_signal, remove_empty

SCRIPT = """
import ctypes, os, subprocess, sys, threading, time
from pathlib import Path
from mcore_rl.processes.stacks import write_child_stacks, write_stacks_to

def wait_in_a_thread():
    time.sleep(600)

def hold_the_lock():
    # A call of native code that keeps the interpreter lock; the kernel restarts `read` after a signal.
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)

if sys.argv[1] == "child":
    write_child_stacks()
else:
    write_stacks_to(Path(sys.argv[1]))
    child = subprocess.Popen([sys.executable, __file__, "child"], stdout=subprocess.DEVNULL)
threading.Thread(target=wait_in_a_thread, daemon=True).start()
time.sleep(0.1)
hold_the_lock()
"""


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_stacks_of_busy_process_and_child_have_all_threads(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with subprocess.Popen([sys.executable, str(script), str(tmp_path / "logs" / "rank_0")]) as process:
        try:
            own = tmp_path / "logs" / "rank_0.stacks"
            wait_until(lambda: list((tmp_path / "logs").glob("rank_0_*.stacks")))
            (child,) = (tmp_path / "logs").glob("rank_0_*.stacks")
            pid = int(child.stem.rpartition("_")[2])
            for number, path in ((process.pid, own), (pid, child)):
                wait_until(lambda number=number: handles_signal(number))  # type: ignore[misc]
                time.sleep(0.5)
                request_stacks([number])
                wait_until(lambda path=path: "hold_the_lock" in text_of(path))  # type: ignore[misc]
                assert "wait_in_a_thread" in text_of(path)
            assert process.poll() is None
        finally:
            for each in (*psutil.Process(process.pid).children(), process):
                each.kill()


RUNNING = """
import asyncio, sys, threading, time
from pathlib import Path
from mcore_rl.processes.stacks import write_stacks_to

def fall(depth):
    # Frames come and go all the time: a reader without the interpreter lock meets some that have just ended.
    return fall(depth - 1) if depth else [None] * 10

def fall_forever(number):
    while True:
        fall(number + 3)

async def wait_in_a_loop():
    await asyncio.sleep(600)

write_stacks_to(Path(sys.argv[1]))
for number in range(3):
    threading.Thread(target=fall_forever, args=(number,), daemon=True).start()
if sys.argv[2] == "sleep":
    time.sleep(600)
elif sys.argv[2] == "lock":
    lock = threading.Lock(); lock.acquire(); lock.acquire()
else:
    asyncio.run(wait_in_a_loop())
"""


REQUESTS = 40
"""A handler in C that reads the stacks of running threads fails within a few requests."""


@pytest.mark.parametrize("main_thread", ["sleep", "lock", "loop"])
def test_process_with_running_threads_survives_requests(main_thread: str, tmp_path: Path) -> None:
    """A handler in C reads the stacks of running threads, so dumps are incomplete, or the process ends."""
    script, path = tmp_path / "script.py", tmp_path / "rank_0.stacks"
    script.write_text(RUNNING)
    with subprocess.Popen([sys.executable, str(script), str(tmp_path / "rank_0"), main_thread]) as process:
        try:
            wait_until(lambda: handles_signal(process.pid))
            time.sleep(0.5)
            for _ in range(REQUESTS):
                request_stacks([process.pid])
                assert process.poll() is None
        finally:
            process.kill()
    text = path.read_text()
    assert text.count("Current thread") == text.count("in <module>") == REQUESTS
    assert text.count("in fall_forever") == 3 * REQUESTS


ALONE = """
import os, sys, time
from pathlib import Path
from mcore_rl.processes.stack_requests import written_stacks
from mcore_rl.processes.stacks import write_stacks_to
write_stacks_to(Path(sys.argv[1]))
print(os.getpid(), written_stacks([os.getpid()]) == {os.getpid()}, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for PID namespaces")
def test_processes_with_equal_ids_in_two_containers_both_answer(tmp_path: Path) -> None:
    """Containers on the host's network have PID namespaces of their own and share abstract sockets."""
    started = []
    try:
        for name in ("first", "second"):
            command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", ALONE, str(tmp_path / name)]
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            assert started[-1].stdout is not None
            assert started[-1].stdout.readline().split() == ["1", "True"]
            assert "Current thread" in text_of(tmp_path / f"{name}.stacks")
    finally:
        for process in started:
            for each in (*psutil.Process(process.pid).children(), process):
                each.kill()
            process.communicate()


def test_process_whose_address_is_taken_starts_and_has_the_signal(tmp_path: Path) -> None:
    code = (
        "import os, socket, sys; from pathlib import Path; from mcore_rl.processes import stacks as s; "
        "other = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); other.bind(s.address_of(os.getpid())); "
        "s.write_stacks_to(Path(sys.argv[1])); assert s.handles_signal(os.getpid())"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "rank_0")], check=True, timeout=60)


def test_handles_signal_is_false_for_other_and_ended_processes() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert not handles_signal(process.pid)
        process.kill()
    assert not handles_signal(process.pid)


def test_remove_empty_keeps_files_with_stacks(tmp_path: Path) -> None:
    (tmp_path / "a.stacks").touch()
    (tmp_path / "b.stacks").write_text("Thread 0x1\n")
    (tmp_path / "c.log").touch()
    remove_empty(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.stacks", "c.log"]


@pytest.mark.parametrize("dumped", [False, True])
def test_killed_child_leaves_a_file_only_with_stacks(
    dumped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "engine"))
    code = "import time; from mcore_rl.processes.stacks import write_child_stacks as w; w(); time.sleep(600)"
    child = Child([sys.executable, "-c", code], os.environ)
    path = tmp_path / f"engine_{child.pid}.stacks"
    try:
        wait_until(lambda: handles_signal(child.pid))
        assert path.exists()
        if dumped:
            os.kill(child.pid, SIGNAL)
            wait_until(lambda: path.stat().st_size)
    finally:
        child.kill()
    assert path.exists() == dumped
