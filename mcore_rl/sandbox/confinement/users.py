"""A user for code of a model where this process is root's: root inside a namespace is root to files of the host."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_FAR = (1 << 30, 1 << 22)
_NEAR = (20_000, 40_000)  # in a container that has 65,536 users at most


def unused_uid(process: int) -> int:
    """A user id of no account, another one for every process."""
    first, count = uid_range()
    uid = first + process % count
    while _is_account(uid):
        uid += 1
    return uid


def uid_range() -> tuple[int, int]:
    """First and number of user ids that no system gives to accounts, as far as this user namespace has them."""
    return _FAR if sum(_FAR) <= _highest_uid() else _NEAR


def run_as(uid: int) -> list[str]:
    """A command that becomes the one after it as another user, without groups."""
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--no-new-privs", "--"]


def num_threads_of(uid: int) -> int:
    """Threads that a user has on this machine, which is what the kernel counts as processes."""
    return sum(_threads(uid))


def _threads(uid: int) -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):  # it may end meanwhile
            if path.stat().st_uid == uid:
                yield len(os.listdir(path / "task"))


def _highest_uid() -> int:
    """Of this user namespace."""
    ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return max(int(inside) + int(length) for inside, _, length in ranges)


def _is_account(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True
