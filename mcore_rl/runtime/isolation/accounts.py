"""Other users who are logged in on this host."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

FIRST_UID = 1000
"""Lowest user id of people; lower ids belong to system services (on Debian, Red Hat and SUSE)."""
NOBODY = 65534
"""Owner that the kernel reports for users without a mapping in a user namespace; not a person."""
PROC = Path("/proc")
LOGIN_SESSIONS = Path("/run/systemd/users")
"""One file per user with a login session, named by user id."""


def other_users() -> list[str]:
    """Return the names of people other than the user of this process who are logged in or have processes here, sorted.

    Root is left out: it can read every process anyway. User ids without an account are left out too: the sandbox uses
    such ids. Where /proc hides the processes of others (hidepid), only login sessions are found.
    """
    uids = {*_process_owners(), *_session_owners()} - {os.getuid()}
    return sorted(name for uid in uids if FIRST_UID <= uid != NOBODY and (name := _account(uid)) is not None)


def _process_owners() -> Iterator[int]:
    for path in PROC.glob("[0-9]*"):
        with suppress(OSError):  # the process may end meanwhile
            yield path.stat().st_uid


def _session_owners() -> Iterator[int]:
    with suppress(OSError):
        yield from (int(path.name) for path in LOGIN_SESSIONS.iterdir() if path.name.isdigit())
    for session in psutil.users():
        with suppress(KeyError):  # a name from a directory service that does not answer
            yield pwd.getpwnam(session.name).pw_uid


def _account(uid: int) -> str | None:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None
