"""The leak check of tests/conftest.py, which applies to every test module, detects leaks."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"

SLEEP = "[sys.executable, '-c', 'import time; time.sleep(60)']"
LEAKS = {
    "child": f"subprocess.Popen({SLEEP})",
    # The parent has ended and the session is another one: after exec, only the inherited variable identifies the
    # process.
    "orphan": f'subprocess.run([sys.executable, "-c", "import subprocess, sys; subprocess.Popen({SLEEP}, '
    'start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)"]); time.sleep(0.5)',
    "forked": "os.fork() or (time.sleep(60), os._exit(0))",
    "segment": "open(f'/dev/shm/mcore_rl_{os.getpid()}_test', 'w').close()",
}
CLEAN = f"subprocess.Popen({SLEEP}).kill()"


def run_module(directory: Path, statement: str) -> str:
    shutil.copy(CONFTEST, directory)
    (directory / "test_it.py").write_text(
        f"import os, subprocess, sys, time\ndef test_it():\n    print('pid', os.getpid())\n    {statement}\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "--rootdir", ".", "test_it.py"]
    # Time limit for the end of processes that the module started: enough to reap a killed process on a busy machine.
    environment = {**os.environ, "PYTHONPATH": str(CONFTEST.parents[1]), "MCORE_RL_TEST_GRACE_SECONDS": "1"}
    result = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    return result.stdout + result.stderr


def ends(pid: int) -> bool:
    """Wait until a process has ended or is a zombie. Reaping can take a moment on a busy machine, and in a container
    its new parent may never do it."""
    deadline = time.monotonic() + 20
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
    return True


@pytest.mark.parametrize("kind", LEAKS)
def test_a_module_that_leaves_something_behind_fails(kind: str, tmp_path: Path) -> None:
    text = run_module(tmp_path, LEAKS[kind])
    try:
        assert "left behind" in text
        assert "1 passed, 1 error" in text
        named = re.search(r"left behind: \['process (\d+)", text)
        assert named is None or ends(int(named[1]))
        assert (named is None) == (kind == "segment")
    finally:
        pid = text.split("pid ")[1].split()[0]
        Path(f"/dev/shm/mcore_rl_{pid}_test").unlink(missing_ok=True)


def test_a_module_that_cleans_up_passes(tmp_path: Path) -> None:
    text = run_module(tmp_path, CLEAN)
    assert "1 passed" in text
    assert "error" not in text
