"""Environment of the tests, and a fixture that fails a module which leaves processes or shared memory behind.

Processes of a test inherit SESSION_VARIABLE, so they are found after the death of their parent. Shared-memory segments
are found by the project's prefix; segments of living processes outside this session do not count.
"""

from __future__ import annotations

import atexit
import gc
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

# One thread per process and no network, before anything imports torch or transformers.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# The tests start hundreds of processes, and each would compile the project again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import psutil
import pytest

from tests.selection import EVERY_TEST

# Otherwise every process of pytest rewrites the assertions of all test files again: 3 of 13 CPU seconds of collection.
sys.dont_write_bytecode = False

SESSION_VARIABLE = "MCORE_RL_TEST_SESSION"
SESSION = f"{os.getpid()}-{time.time_ns()}"
SHARED_MEMORY = Path("/dev/shm")
ORDER = ("e2e", "contract", "distributed", "te", "architecture", "unit")
"""Folders of tests, slowest first: otherwise one process would run the last slow test while the others are idle."""
GRACE_SECONDS = float(os.environ.get("MCORE_RL_TEST_GRACE_SECONDS", "15"))
"""Time for processes to end after a test; Ray's daemons need a few seconds."""
MANY_TESTS = 1000
"""Number of tests of which the modules are exempt from collections of reference cycles."""
HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Helper processes of multiprocessing: one of each per process; they end with it."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cuda(only=False): needs a CUDA device; only=True: cannot run on a CPU instead")
    config.addinivalue_line("markers", "gpus(count): needs this number of GPUs")
    config.addinivalue_line("markers", "te: needs transformer-engine")
    config.addinivalue_line("markers", "vllm: needs vLLM for CUDA")
    config.addinivalue_line("markers", "sglang: needs SGLang for CUDA, in its environment")
    config.addinivalue_line("markers", "slow: takes more than about 5 seconds on a busy machine")
    config.addinivalue_line(
        "markers", "on_demand: runs only with MCORE_RL_EVERY_TEST=1; other tests cover the facts in part"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: next((place for place, name in enumerate(ORDER) if name in item.path.parts), -1))
    if not EVERY_TEST:
        for item in items:
            if item.get_closest_marker("on_demand"):
                item.add_marker(pytest.mark.skip(reason="on demand: MCORE_RL_EVERY_TEST=1"))


def pytest_collection_finish(session: pytest.Session) -> None:
    # Modules and test items stay until the end. Otherwise a test that calls gc.collect traverses them for seconds.
    if len(session.items) > MANY_TESTS:
        gc.freeze()
        atexit.register(gc.unfreeze)  # nanobind prints warnings about objects that are never freed


@pytest.fixture(scope="module", autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a module after which a process or a shared-memory segment of this session remains."""
    if len(request.session.items) > MANY_TESTS:
        # Modules that earlier tests imported stay too.
        gc.collect()
        gc.freeze()
    previous = os.environ.get(SESSION_VARIABLE)
    os.environ[SESSION_VARIABLE] = SESSION
    segments = _segments()
    yield
    deadline = time.monotonic() + GRACE_SECONDS
    while (left := _left_behind(segments)) and time.monotonic() < deadline:
        time.sleep(0.2)
    if previous is None:
        del os.environ[SESSION_VARIABLE]
    else:
        os.environ[SESSION_VARIABLE] = previous
    for process in _own_processes() if left else ():  # otherwise every later module would fail too
        process.kill()
    assert not left, f"left behind: {left}"


def _left_behind(segments_before: set[str]) -> list[str]:
    left = [f"process {process.pid}: {_command(process)}" for process in _own_processes()]
    return left + [f"/dev/shm/{name}" for name in sorted(_segments() - segments_before) if _is_own_segment(name)]


def _own_processes() -> list[psutil.Process]:
    """Return the living processes of this session: descendants, and processes whose parents have ended."""
    children = set(psutil.Process().children(recursive=True))
    # A forked child keeps its parent's initial environment, so it is found as a descendant only.
    found = children | {p for p in psutil.process_iter() if _environment(p).get(SESSION_VARIABLE) == SESSION}
    return [p for p in found if p.pid != os.getpid() and _is_alive(p) and not _is_helper(p)]


def _is_helper(process: psutil.Process) -> bool:
    """Return True for a helper of multiprocessing, not for a child of the fork server (same command line)."""
    try:
        return process.ppid() == os.getpid() and any(helper in _command(process) for helper in HELPERS)
    except psutil.Error:
        return False


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.Error, OSError):  # ended, a zombie, or owned by another user
        return {}


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:200]
    except psutil.Error:
        return "?"


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _segments() -> set[str]:
    return {path.name for path in SHARED_MEMORY.glob("mcore_rl_*")} if SHARED_MEMORY.is_dir() else set()


def _is_own_segment(name: str) -> bool:
    """Return False for a segment of a living process of another session (a run next to the tests)."""
    found = re.search(r"_(\d+)_", name)
    pid = int(found[1]) if found else None
    if pid is None or not psutil.pid_exists(pid):
        return True
    return pid == os.getpid() or _environment(psutil.Process(pid)).get(SESSION_VARIABLE) == SESSION


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
