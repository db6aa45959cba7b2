"""Memory limit of all processes of a sandbox: a control group if possible, otherwise a sum of resident sizes."""

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

import psutil

_MOUNT = Path("/sys/fs/cgroup")
PREFIX = "mcore_rl_sandbox_"
_REMOVAL_SECONDS = 5.0
"""Time to wait for killed processes before the group is left to the next removal."""
_JOIN = 'echo 0 > "$0" && exec "$@"'
"""The shell joins the group, then executes the command; writing 0 to cgroup.procs moves the writing process."""
_serial = itertools.count()
_busy_groups: list[Path] = []
"""Groups that could not be removed in time because killed processes still held them."""


def limit_memory(limit_bytes: int) -> ControlGroup | Watcher:
    """Return a memory limit of one sandbox. The caller runs its command after `prefix` and calls close() after the
    run."""
    parent = _parent_group()
    return ControlGroup(parent, limit_bytes) if parent else Watcher(limit_bytes)


class ControlGroup:
    """Control group of version 1 or 2. Its limit includes in-memory files, pipes and kernel memory."""

    def __init__(self, parent: Path, limit_bytes: int) -> None:
        for path in _busy_groups[:]:
            with suppress(OSError):
                path.rmdir()
                _busy_groups.remove(path)
        self._path = parent / f"{PREFIX}{os.getpid()}_{next(_serial)}"
        self._path.mkdir()
        try:
            if (self._path / "memory.max").exists():
                # oom.group: the kernel then kills the whole group, not only its largest process.
                self._set({"memory.max": limit_bytes, "memory.swap.max": 0, "memory.oom.group": 1})
            else:
                self._set({"memory.limit_in_bytes": limit_bytes, "memory.memsw.limit_in_bytes": limit_bytes})
        except OSError:
            self._path.rmdir()
            raise
        self.limits_memory = any((self._path / name).exists() for name in ("memory.max", "memory.limit_in_bytes"))
        self.prefix = ["/bin/sh", "-c", _JOIN, str(self._path / "cgroup.procs")]

    def exceeded(self, pid: int) -> bool:
        """Return whether the sandbox below process `pid` exceeded the limit."""
        for name in ("memory.events", "memory.oom_control"):
            with suppress(FileNotFoundError):
                fields = dict(line.split() for line in (self._path / name).read_text().splitlines())
                return int(fields.get("oom_kill", 0)) > 0
        return False

    def close(self) -> None:
        """Kill the remaining processes and remove the group.

        Dying processes hold the group for a moment. If they hold it longer than _REMOVAL_SECONDS, the next group's
        creation removes it.
        """
        deadline = time.monotonic() + _REMOVAL_SECONDS
        while True:
            for pid in (self._path / "cgroup.procs").read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            try:
                return self._path.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    return _busy_groups.append(self._path)
                time.sleep(0.002)

    def _set(self, values: dict[str, int]) -> None:
        for name, value in values.items():
            file = self._path / name
            if file.exists():  # not every kernel has the files of the swap limit
                file.write_text(str(value))


class Watcher:
    """Limit on the sum of resident memory, if control groups are not available. The caller polls exceeded()."""

    def __init__(self, limit_bytes: int) -> None:
        self.prefix: list[str] = []
        self._limit_bytes = limit_bytes

    def exceeded(self, pid: int) -> bool:
        total = 0
        with suppress(psutil.Error):  # the process just ended
            root = psutil.Process(pid)
            for process in [root, *root.children(recursive=True)]:
                with suppress(psutil.Error):
                    total += process.memory_info().rss
        return total > self._limit_bytes

    def close(self) -> None: ...


@cache
def _parent_group() -> Path | None:
    """Return a group in which this process may create groups with a memory limit.

    None in most containers and for ordinary users.
    """
    return next((candidate for candidate in _candidates() if _is_usable(candidate)), None)


def _candidates() -> list[Path]:
    """Return the memory group of this process and its parent or root group, for version 1 and version 2."""
    places = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        # Version 1 has a line with the names of its controllers, version 2 a line without names.
        if "memory" in controllers.split(","):
            places += [_MOUNT / "memory" / path.lstrip("/"), _MOUNT / "memory"]
        elif not controllers:
            places += [_MOUNT / path.lstrip("/"), (_MOUNT / path.lstrip("/")).parent]
    return [place for place in places if place.is_relative_to(_MOUNT) and place.is_dir()]


def _is_usable(parent: Path) -> bool:
    """Try to create a group with a memory limit, and to join it."""
    _remove_stale_groups(parent)
    try:
        group = ControlGroup(parent, 1 << 30)
    except OSError:
        return False
    try:
        return group.limits_memory and subprocess.run([*group.prefix, "true"], capture_output=True).returncode == 0
    finally:
        group.close()


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
    """Remove the groups of killed processes."""
    for group in parent.glob(f"{PREFIX}*"):
        pid = group.name.removeprefix(PREFIX).split("_")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            with suppress(OSError):  # another process removes it at the same time
                group.rmdir()
