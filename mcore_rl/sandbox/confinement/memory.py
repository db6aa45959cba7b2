"""Memory of all processes of a sandbox together: by a control group where one can be made, else by adding it up."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Protocol

import psutil

_MOUNT = Path("/sys/fs/cgroup")
PREFIX = "mcore_rl_sandbox_"
_REMOVAL_SECONDS = 5.0
_JOIN = 'echo 0 > "$0" && exec "$@"'
"""The shell joins the group before anything else runs in it; 0 is the one who writes."""
_serial = itertools.count()
_held: list[Path] = []
"""Groups that processes being killed held longer than anybody waits for them, on a very busy machine."""


class MemoryLimit(Protocol):
    """Of one sandbox; close() is called when it is over."""

    prefix: list[str]
    """A command that becomes the one after it under the limit."""

    def exceeded(self, pid: int) -> bool:
        """Whether the sandbox under process `pid` has had, or has, more."""
        ...

    def close(self) -> None: ...


def limit_memory(limit_bytes: int) -> MemoryLimit:
    parent = _parent_group()
    return ControlGroup(parent, limit_bytes) if parent else Watcher(limit_bytes)


class ControlGroup:
    """A group of the memory controller, version 1 or 2: files in memory, pipes and kernel memory count too."""

    def __init__(self, parent: Path, limit_bytes: int) -> None:
        _remove_held()
        self._path = parent / f"{PREFIX}{os.getpid()}_{next(_serial)}"
        self._path.mkdir()
        try:
            if (self._path / "memory.max").exists():
                self._set({"memory.max": limit_bytes, "memory.swap.max": 0, "memory.oom.group": 1})
            else:
                self._set({"memory.limit_in_bytes": limit_bytes, "memory.memsw.limit_in_bytes": limit_bytes})
        except OSError:
            self._path.rmdir()
            raise
        self.limits_memory = any((self._path / name).exists() for name in ("memory.max", "memory.limit_in_bytes"))
        self.prefix = ["/bin/sh", "-c", _JOIN, str(self._path / "cgroup.procs")]

    def exceeded(self, pid: int) -> bool:
        for name in ("memory.events", "memory.oom_control"):
            with suppress(FileNotFoundError):
                fields = dict(line.split() for line in (self._path / name).read_text().splitlines())
                return int(fields.get("oom_kill", 0)) > 0
        return False

    def close(self) -> None:
        """Ends what is still in the group. Processes that are being killed hold it for a moment; where they do so for
        long, it is removed with the next one."""
        deadline = time.monotonic() + _REMOVAL_SECONDS
        while True:
            for pid in (self._path / "cgroup.procs").read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            try:
                return self._path.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    return _held.append(self._path)
                time.sleep(0.002)

    def _set(self, values: dict[str, int]) -> None:
        for name, value in values.items():
            file = self._path / name
            if file.exists():  # those of swap are not everywhere
                file.write_text(str(value))


class Watcher:
    """Adds up what the processes have resident; the reader asks often enough."""

    def __init__(self, limit_bytes: int) -> None:
        self.prefix: list[str] = []
        self._limit_bytes = limit_bytes

    def exceeded(self, pid: int) -> bool:
        try:
            root = psutil.Process(pid)
            processes = [root, *root.children(recursive=True)]
        except psutil.Error:  # it has just ended
            return False
        return sum(map(_resident_bytes, processes)) > self._limit_bytes

    def close(self) -> None:
        pass


def _resident_bytes(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.Error:
        return 0


@cache
def _parent_group() -> Path | None:
    """Where groups with a limit on memory can be made; None: nowhere, in most containers and for ordinary users."""
    return next((candidate for candidate in _candidates() if _is_usable(candidate)), None)


def _candidates() -> list[Path]:
    """The group of this process and those around it, of version 1 and then of version 2."""
    places = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            places += [_MOUNT / "memory" / path.lstrip("/"), _MOUNT / "memory"]
        elif not controllers:
            places += [_MOUNT / path.lstrip("/"), (_MOUNT / path.lstrip("/")).parent]
    return [place for place in places if place.is_relative_to(_MOUNT) and place.is_dir()]


def _is_usable(parent: Path) -> bool:
    """Whether a group there has limits and can be joined: both are tried."""
    _remove_stale_groups(parent)
    try:
        group = ControlGroup(parent, 1 << 30)
    except OSError:
        return False
    try:
        return group.limits_memory and subprocess.run([*group.prefix, "true"], capture_output=True).returncode == 0
    finally:
        group.close()


def _remove_held() -> None:
    for path in _held[:]:
        with suppress(OSError):
            path.rmdir()
            _held.remove(path)


@contextmanager
def groups_removed() -> Iterator[None]:
    """Remove the groups of processes that are killed in the block before they can do so themselves, such as graders at
    the end of a run. On other hosts, the next process that uses a sandbox removes them."""
    try:
        yield
    finally:
        for parent in _candidates():
            _remove_stale_groups(parent)


def _remove_stale_groups(parent: Path) -> None:
    """Of processes that were killed before they could do so."""
    for group in parent.glob(f"{PREFIX}*"):
        pid = group.name.removeprefix(PREFIX).split("_")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            with suppress(OSError):  # another process of the run is at it too
                group.rmdir()
