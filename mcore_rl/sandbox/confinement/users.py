"""User ids for untrusted code if this process runs as root: root inside a namespace is root for files of the host."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# First id and number of ids.
_FAR = (1 << 30, 1 << 22)
_NEAR = (20_000, 40_000)  # for containers, which often have only 65,536 user ids


def unused_uid(process: int) -> int:
    """Return a user id without an account, different for every process."""
    first, count = uid_range()
    uid = first + process % count
    while _is_account(uid):
        uid += 1
    return uid


def uid_range() -> tuple[int, int]:
    """Return first and number of user ids that are never accounts and exist in this user namespace."""
    return _FAR if sum(_FAR) <= _highest_uid() else _NEAR


def run_as(uid: int) -> list[str]:
    """Return a command prefix that executes the rest as another user, without groups."""
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--no-new-privs", "--"]


def num_threads_of(uid: int) -> int:
    """Count the threads of a user on this machine, which RLIMIT_NPROC limits."""
    return sum(_threads(uid))


def _threads(uid: int) -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):  # the process can end meanwhile
            if path.stat().st_uid == uid:
                yield len(os.listdir(path / "task"))


def _highest_uid() -> int:
    """Return the upper bound of user ids in this user namespace."""
    ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return max(int(inside) + int(length) for inside, _, length in ranges)


def _is_account(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True
