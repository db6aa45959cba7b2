"""Sandboxes of each kind, and a check for remaining processes, control groups and files."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import psutil
import pytest

from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.errors import ConfigError
from mcore_rl.sandbox.check import check_local
from mcore_rl.sandbox.confinement import memory
from mcore_rl.sandbox.confinement.commands import unused_uid
from mcore_rl.sandbox.local import LocalSandbox

LIMITS = {"seconds": 20.0, "cpu_seconds": 5, "memory_mib": 256, "processes": 16, "tmp_mib": 24, "file_mib": 8}


def limited(kind: str = "bubblewrap", **changes: object) -> SandboxConfig:
    return SandboxConfig(kind=kind, **{**LIMITS, "max_running": 8, **changes})


def working(config: SandboxConfig) -> LocalSandbox:
    try:
        check_local(config)
    except ConfigError as error:
        pytest.skip(str(error))
    return LocalSandbox(config)


@pytest.fixture(scope="session")
def sandbox() -> LocalSandbox:
    return working(limited())


@pytest.fixture(scope="session")
def landlock() -> LocalSandbox:
    return working(limited("landlock"))


def left_behind(before: set[psutil.Process]) -> list[str]:
    """Return remaining control groups and living processes: of the sandboxes' user, and children not in `before`."""
    uid = unused_uid(os.getpid()) if os.geteuid() == 0 else None
    children = psutil.Process().children(recursive=True)
    strangers = [p for p in psutil.process_iter(["uids"]) if p.info["uids"] and p.info["uids"].real == uid]
    living = [p for p in {*children, *strangers} - before if p.status() != psutil.STATUS_ZOMBIE]
    parent = memory._parent_group()
    groups = [str(path) for path in parent.glob(f"{memory.PREFIX}{os.getpid()}_*")] if parent else []
    return [*(f"{p.pid} {p.name()}" for p in living), *groups]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))  # processes of other tests
    yield
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            left = left_behind(before)
        except psutil.NoSuchProcess:
            continue
        if not left:
            return
        time.sleep(0.02)
    pytest.fail(f"left behind: {left}")
