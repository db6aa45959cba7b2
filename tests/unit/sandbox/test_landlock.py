"""Confinement by Landlock."""

from __future__ import annotations

import glob
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_rl.sandbox.interface import Program
from mcore_rl.sandbox.local import LocalSandbox
from tests.unit.sandbox.test_escapes import FORK_BOMB, MANY, all_refused


@pytest.fixture(autouse=True)
def no_directory_is_left() -> Iterator[None]:
    """Directories of concurrent tests count too; they disappear as well."""
    pattern = f"{tempfile.gettempdir()}/mcore_rl_sandbox_*"
    before = set(glob.glob(pattern))
    yield
    seen, deadline = set(glob.glob(pattern)) - before, time.monotonic() + 60
    while (left := seen & set(glob.glob(pattern))) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left == set()


def test_files_sockets_and_processes_of_the_host_are_refused(landlock: LocalSandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s3cret")
    tmp_path.chmod(0o755)
    paths = ("/etc/passwd", "/proc/self/environ", "/proc/1/cmdline", str(tmp_path / "secret"), __file__)
    with socket.socket() as tcp:
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        attempts = {f"read {path}": f"attempt(lambda: open({path!r}).read())" for path in paths} | {
            "list": "attempt(lambda: os.listdir('/tmp'))",
            "write": "write_to('/usr/x', 64)",
            "tcp": f"attempt(lambda: socket.create_connection(('127.0.0.1', {tcp.getsockname()[1]}), 2))",
            "udp": "attempt(lambda: socket.socket(2, 2))",
            "unix": "attempt(lambda: socket.socket(1))",
            "signal to this run": f"attempt(lambda: os.kill({os.getpid()}, 0))",
            "signal to the launcher": "attempt(lambda: os.kill(os.getppid(), 0))",
            "namespace": "call(272, 0x10000000)",
        }
        all_refused(landlock, attempts)


def test_remaining_processes_and_files_are_removed(landlock: LocalSandbox) -> None:
    code = (
        "import os, time\nopen('left', 'w').write('x')\nif os.fork() == 0:\n  os.setsid()\n"
        "  if os.fork() == 0: time.sleep(777)\n"
        "  os._exit(0)\nprint(os.getcwd())"
    )
    outcome = landlock.run(Program(code, fetch=("left",)))
    assert outcome.ok, outcome
    assert outcome.files == {"left": b"x"}
    assert not Path(outcome.stdout.strip()).exists()


def test_timeout_kills_processes_and_removes_files(landlock: LocalSandbox) -> None:
    code = (
        "import os, time\nos.fork(); os.fork(); os.setsid() if os.getpid() != os.getsid(0) else 0\n"
        "print(os.getcwd(), flush=True)\ntime.sleep(99)"
    )
    outcome = landlock.run(Program(code, seconds=1.5))
    assert outcome.why == "timeout"
    assert outcome.stdout
    assert not Path(outcome.stdout.split()[0]).exists()


def test_processes_and_memory_have_limits(landlock: LocalSandbox) -> None:
    assert int(landlock.run(Program(FORK_BOMB)).stdout.split()[0]) < 16
    assert landlock.run(Program(MANY)).why == "memory"


def test_interpreter_keeps_state_under_landlock(landlock: LocalSandbox) -> None:
    with landlock.interpreter() as interpreter:
        assert interpreter.cell("x = 6").ok
        assert interpreter.cell("x * 7").output == "42\n"
