"""Launcher: confines a command with Landlock, waits for it, and kills processes that remain. Argument: orders as JSON.

The launcher itself is not confined. Code inside cannot signal it: it runs under another user id (if started by root),
or Landlock forbids signals to processes outside (ABI 6). Uses only the standard library, without site-packages.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, TypedDict

libc = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38
SECCOMP_MODE_FILTER = 2
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same on every architecture
ABI_OF_SIGNALS = 6
"""First Landlock version that can forbid signals to processes outside."""
FAILED = 125  # exit code if the command could not be confined; a shell uses 126 and above itself

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
TRUNCATE, IOCTL_DEV = 1 << 14, 1 << 15
READ = EXECUTE | READ_FILE | READ_DIR
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV


class Orders(TypedDict):
    """Arguments of the launcher.

    users: first user id and number of ids; root runs the command under one of them.
    environment: empty values are replaced with the working directory.
    """

    readable: list[str]
    writable: list[str]
    filter: str
    environment: dict[str, str]
    command: list[str]
    users: list[int]


class Stopped(BaseException):
    """SIGTERM arrived: from the parent, or from the kernel after the parent died."""


def main() -> int:
    """Run the command. Returns its exit code, 128 + N after signal N."""
    orders: Orders = json.loads(sys.argv[1])
    abi = check(libc.syscall(CREATE_RULESET, None, 0, 1), "Landlock")
    uid = orders["users"][0] + os.getpid() % orders["users"][1] if os.geteuid() == 0 else None
    if uid is None and abi < ABI_OF_SIGNALS:
        needed = f"ABI {ABI_OF_SIGNALS} (Linux 6.12) does, or a start as root"
        raise OSError(f"Landlock ABI {abi} of this kernel does not confine signals; {needed}")
    # Before the fork: the command must not outlive the parent of this process.
    signal.signal(signal.SIGTERM, stop)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    work = tempfile.mkdtemp(prefix="mcore_rl_sandbox_")
    try:
        if uid is not None:
            os.chown(work, uid, uid)
        child = os.fork()
        if child == 0:
            become(orders, work, uid, abi)
        return wait_for(child)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_all(uid)
        shutil.rmtree(work)


def stop(signum: int, frame: object) -> NoReturn:
    raise Stopped


def become(orders: Orders, work: str, uid: int | None, abi: int) -> NoReturn:
    """Confine this process and execute the command."""
    try:
        for number in (signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        # The launcher must not be in the process group that code inside can signal.
        os.setsid()
        if uid is not None:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.chdir(work)
        check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
        confine(orders["readable"], orders["writable"], work, abi)
        filter_calls(bytes.fromhex(orders["filter"]))
        variables = {name: value or work for name, value in orders["environment"].items()}
        os.execve(orders["command"][0], orders["command"], variables)
    except BaseException as error:  # the forked copy must not return into the code of its parent
        os.write(2, f"{error}\n".encode())
    os._exit(FAILED)


def confine(readable: Iterable[str], writable: Iterable[str], work: str, abi: int) -> None:
    """Restrict files, TCP, abstract sockets and signals, as far as this kernel's Landlock ABI supports it."""
    # struct landlock_ruleset_attr: rights of files (13 in ABI 1), TCP bind and connect, scopes. A kernel rejects bits
    # and fields that its ABI does not know.
    files = (1 << 13) - 1
    files |= sum(bit for since, bit in ((2, 1 << 13), (3, TRUNCATE), (5, IOCTL_DEV)) if abi >= since)
    fields = [files, *([0b11] if abi >= 4 else []), *([0b11] if abi >= ABI_OF_SIGNALS else [])]
    ruleset = struct.pack(f"={len(fields)}Q", *fields)
    descriptor = check(libc.syscall(CREATE_RULESET, ruleset, len(ruleset), 0), "landlock_create_ruleset")
    allow(descriptor, readable, files & READ)
    allow(descriptor, writable, files & OF_FILES & ~EXECUTE)
    allow(descriptor, [work], files)
    check(libc.syscall(RESTRICT_SELF, descriptor, 0), "landlock_restrict_self")
    os.close(descriptor)


def allow(ruleset: int, paths: Iterable[str], rights: int) -> None:
    for path in filter(os.path.exists, paths):
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", rights if os.path.isdir(path) else rights & OF_FILES, place)
        check(libc.syscall(ADD_RULE, ruleset, 1, rule, 0), f"landlock_add_rule for {path}")
        os.close(place)


def filter_calls(program: bytes) -> None:
    """Install a seccomp filter."""

    class FilterProgram(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]

    whole = FilterProgram(len(program) // 8, program)
    check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(whole), 0, 0), "seccomp")


def wait_for(child: int) -> int:
    """Wait for the child; also reap orphans, since this process is their subreaper. Returns the child's exit code."""
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return 128 - code if code < 0 else code


def end_all(uid: int | None) -> None:
    """Kill all remaining processes. As this process is the subreaper, orphans become its children."""
    while True:
        if uid is None:
            for pid in descendants(os.getpid()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        else:
            kill_user(uid)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def kill_user(uid: int) -> None:
    """Kill all processes of the user with one call, so that a fork cannot escape. No other process has this user id."""
    killer = os.fork()
    if killer == 0:
        try:
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(killer, 0)


def descendants(pid: int) -> list[int]:
    children: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the process just ended
            children += map(int, path.read_text().split())
    return children + [each for child in children for each in descendants(child)]


def check(result: int, what: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return result


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Stopped:
        sys.exit(128 + signal.SIGTERM)
    except OSError as failure:
        print(f"landlock: {failure}", file=sys.stderr)
        sys.exit(FAILED)
