"""What every test module must leave as it found it, and the environment in which all of them run.

A process that a test started stays findable after its parent has died: it inherits SESSION_VARIABLE. Shared memory is
looked up by the segment prefix of the project; only segments that no living process outside this session maps count.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

# One thread per process and no network, before anything imports torch or transformers.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Hundreds of processes follow: each would compile the project anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import psutil
import pytest

SESSION_VARIABLE = "MCORE_RL_TEST_SESSION"
SESSION = f"{os.getpid()}-{time.time_ns()}"
SHARED_MEMORY = Path("/dev/shm")
EVERY_TEST = bool(os.environ.get("MCORE_RL_EVERY_TEST"))
ROOMS = ("e2e", "contract", "dist", "te", "architecture", "unit")
GRACE_SECONDS = float(os.environ.get("MCORE_RL_TEST_GRACE_SECONDS", "15"))
"""How long what a test started may take to go once the test is over; Ray's daemons need a few seconds."""
HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Python's own helpers: one of each per process, and they end with it."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cuda(only=False): needs a CUDA device; only: and no CPU in its place")
    config.addinivalue_line("markers", "gpus(count): needs so many of them")
    config.addinivalue_line("markers", "te: needs transformer-engine")
    config.addinivalue_line("markers", "vllm: needs vLLM for CUDA")
    config.addinivalue_line("markers", "slow: takes more than about 20 seconds")
    config.addinivalue_line(
        "markers", "on_demand: run with MCORE_RL_EVERY_TEST=1 only; what it covers, others do in part"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The longest first, so that no process is left with one of them when the others have nothing more to do.
    items.sort(key=lambda item: next((place for place, room in enumerate(ROOMS) if room in item.path.parts), -1))
    if not EVERY_TEST:
        for item in items:
            if item.get_closest_marker("on_demand"):
                item.add_marker(pytest.mark.skip(reason="on demand: MCORE_RL_EVERY_TEST=1"))


@pytest.fixture(scope="module", autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fails the module after which a process or a shared-memory segment of this session remains."""
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
    for process in _own_processes():  # else every later module would be blamed as well
        process.kill()
    assert not left, f"left behind: {left}"


def _left_behind(segments_before: set[str]) -> list[str]:
    left = [f"process {process.pid}: {_command(process)}" for process in _own_processes()]
    return left + [f"/dev/shm/{name}" for name in sorted(_segments() - segments_before) if _is_own_segment(name)]


def _own_processes() -> list[psutil.Process]:
    """Living processes started by this session: its descendants, and those whose parents are gone."""
    children = set(psutil.Process().children(recursive=True))
    # A forked child keeps its parent's initial environment, so it is found as a descendant only.
    found = children | {p for p in psutil.process_iter() if _environment(p).get(SESSION_VARIABLE) == SESSION}
    return [p for p in found if p.pid != os.getpid() and _is_alive(p) and not _is_helper(p)]


def _is_helper(process: psutil.Process) -> bool:
    """What the fork server has forked has its command line too, but is no direct child."""
    try:
        return process.ppid() == os.getpid() and any(helper in _command(process) for helper in HELPERS)
    except psutil.Error:
        return False


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.Error, OSError):  # gone, a zombie, or another user's
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
    """Not one that a living process of another session (a run beside the tests) has made."""
    pid = name.split("_")[-2]
    if not pid.isdigit() or not psutil.pid_exists(int(pid)):
        return True
    return int(pid) == os.getpid() or _environment(psutil.Process(int(pid))).get(SESSION_VARIABLE) == SESSION
