"""Exit status of processes, including processes that are not children of this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from mcore_rl.processes import exits
from mcore_rl.processes.exits import Exits, exit_text, signal_name

# Starts a child that reads a line and then runs the code in the argument; prints its pid and waits for it.
PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import os, signal, sys; input(); " + sys.argv[1]])
print(child.pid, flush=True)
child.wait()
"""
ENDS = {
    "pass": "exit code 0",
    "os._exit(3)": "exit code 3",
    "os.kill(os.getpid(), signal.SIGSEGV)": "killed by SIGSEGV",
    "os.kill(os.getpid(), signal.SIGRTMIN + 3)": f"killed by signal {signal.SIGRTMIN + 3}",
}


@pytest.mark.parametrize("how", list(ENDS))
def test_status_of_a_grandchild_is_that_of_its_end(how: str) -> None:
    command = [sys.executable, "-c", PARENT, how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        followed = Exits()
        followed.follow(1, int(parent.stdout.readline()))
        parent.stdin.write(b"\n")
        parent.stdin.close()
        parent.wait(60)
        status = followed.status(1)
        followed.forget(1)
    if status is None:  # before Linux 6.15
        pytest.skip("this kernel does not report it")
    assert status == ENDS[how]


def test_status_of_unknown_and_running_processes_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exits, "SECONDS_UNTIL_REAPED", 0.05)
    followed = Exits()
    followed.follow(1, os.getpid())
    followed.follow(2, 2**22 + 1)  # beyond the largest pid
    assert [followed.status(key) for key in (1, 2, 3)] == [None, None, None]
    followed.forget(1)


def test_status_of_a_killed_process_mentions_the_oom_killer(monkeypatch: pytest.MonkeyPatch) -> None:
    kills = iter([5, 7])
    monkeypatch.setattr(exits, "_num_oom_kills", lambda: next(kills))
    monkeypatch.setattr(exits, "_exit_status", lambda descriptor: signal.SIGKILL)
    followed = Exits()
    followed.follow(1, os.getpid())
    assert followed.status(1) == (
        "killed by SIGKILL; during the run, the kernel killed 2 processes here for lack of memory"
    )
    followed.forget(1)


def test_signal_name_of_a_real_time_signal_is_its_number() -> None:
    assert signal_name(signal.SIGTERM) == "SIGTERM"
    assert signal_name(40) == "signal 40"
    assert [exit_text(code) for code in (3, -9, -40)] == ["exit code 3", "signal SIGKILL", "signal 40"]
