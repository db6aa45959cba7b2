"""Killing a child process ends its whole tree: other sessions, daemons, processes that ignore TERM."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from mcore_rl.processes.child import Child, kill_all

STARTS = {
    "child": "subprocess.Popen(SLEEP)",
    "session of its own": "subprocess.Popen(SLEEP, start_new_session=True)",
    "empty environment": "subprocess.Popen(SLEEP, start_new_session=True, env={})",
    "daemon": "os.fork() == 0 and (os.setsid(), os.fork() == 0 and os.execv(SLEEP[0], SLEEP), os._exit(0))",
    "ignores TERM": "signal.signal(signal.SIGTERM, signal.SIG_IGN); subprocess.Popen(SLEEP, start_new_session=True)",
    "shell in the background": "subprocess.run(['/bin/sh', '-c', 'setsid ' + ' '.join(SLEEP) + ' &'])",
}


def code(start: str, tag: str) -> str:
    """Return Python source that starts `sleep`; the test finds it by its duration `tag`."""
    return f"import os, signal, subprocess\nSLEEP = ['/bin/sleep', '{tag}']\n{start}\n"


def running(tag: str) -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if process.info["cmdline"] == ["/bin/sleep", tag] and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found


def await_running(tag: str) -> None:
    deadline = time.monotonic() + 30
    while not running(tag) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert running(tag)


@pytest.fixture
def tag() -> Iterator[str]:
    tag = str(7_000_000 + time.time_ns() % 1_000_000)
    yield tag
    for pid in running(tag):
        os.kill(pid, 9)


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS.keys())
def test_kill_of_a_running_child_ends_its_tree(start: str, tag: str) -> None:
    child = Child([sys.executable, "-c", code(start, tag) + "import time\ntime.sleep(1000)"], os.environ)
    await_running(tag)
    assert child.exit_code is None
    assert child.kill() == -9
    assert running(tag) == []


@pytest.mark.parametrize("name", [name for name in STARTS if name != "empty environment"])
def test_kill_of_a_child_that_has_ended_ends_its_tree(name: str, tag: str) -> None:
    child = Child([sys.executable, "-c", code(STARTS[name], tag)], os.environ)
    await_running(tag)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert child.kill() == 0
    assert running(tag) == []


@pytest.mark.parametrize("kill", [Child.kill, lambda child: kill_all([child])], ids=["kill", "kill_all"])
def test_kill_removes_the_shared_memory_of_the_tree(kill: Callable[[Child], object], tmp_path: Path) -> None:
    source = (
        "import pathlib, sys, time\nfrom multiprocessing.shared_memory import SharedMemory\n"
        "segment = SharedMemory(create=True, size=8)\npathlib.Path(sys.argv[1]).write_text(segment.name)\n"
        "time.sleep(1000)"
    )
    child = Child([sys.executable, "-c", source, str(tmp_path / "name")], os.environ)
    deadline = time.monotonic() + 30
    while not (tmp_path / "name").exists() or not (tmp_path / "name").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    segment = Path("/dev/shm") / (tmp_path / "name").read_text()
    assert segment.exists()
    kill(child)
    assert not segment.exists()


@pytest.mark.parametrize("program", ["exit 3", "kill -15 $$"])
def test_exit_code_leaves_the_child_unreaped(program: str) -> None:
    child = Child(["/bin/sh", "-c", program], os.environ)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    expected = 3 if "exit" in program else -15
    assert child.exit_code == expected
    assert psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE
    assert child.kill() == child.exit_code == expected


def test_kill_spares_the_tree_of_another_child(tag: str) -> None:
    other, child = (Child(["/bin/sleep", seconds], os.environ) for seconds in (tag, "1000"))
    child.kill()
    assert running(tag) == [other.pid]
    kill_all([other])
    assert running(tag) == []


PARENT = """
import sys, time
from mcore_rl.processes.child import start_module
child, _ = start_module("calculating")
print(child.pid, flush=True)
time.sleep(600)
"""


def test_child_ends_with_its_parent_even_while_it_computes(tmp_path: Path) -> None:
    (tmp_path / "calculating.py").write_text(
        "from mcore_rl.processes.served import parent_socket\nparent_socket().send(b'1')\nwhile True: pass\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    child.wait(timeout=60)
