"""Run a command in a private network namespace: `python -m mcore_rl.runtime.isolation.namespace COMMAND...`.

The namespace has only a loopback interface of its own. Processes of other users cannot enter it, so they cannot connect
to ports of the run. Root needs CAP_SYS_ADMIN. Other users enter a user namespace first, in which they keep
their user id; the kernel allows that to single-threaded processes only, hence this separate program.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
from pathlib import Path
from typing import NoReturn

NAMESPACE_VARIABLE = "MCORE_RL_NETWORK_NAMESPACE"
"""Identity of the private namespace that a process and its children are in."""
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_IFREQ = "16sH22x"


def main() -> NoReturn:
    """Enter a new namespace and execute the command in sys.argv."""
    enter()
    os.environ[NAMESPACE_VARIABLE] = current()
    os.execv(sys.argv[1], sys.argv[2:])


def enter() -> None:
    """Move this process, which must have a single thread, into a new network namespace.

    Raises: OSError if the kernel or its policy does not allow it.
    """
    uid, gid = os.geteuid(), os.getegid()
    flags = _CLONE_NEWNET if uid == 0 else _CLONE_NEWNET | _CLONE_NEWUSER
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    if uid != 0:
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")  # required before gid_map
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1", encoding="ascii")
    _raise_loopback()


def can_enter() -> bool:
    """Return whether `enter` works here; tries it in a child process."""
    child = os.fork()
    if child == 0:
        try:
            enter()
        except OSError:
            # `_exit` skips exit handlers, which belong to the parent.
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def is_inside() -> bool:
    """Return whether this process is in the private namespace of a run."""
    return os.environ.get(NAMESPACE_VARIABLE) == current()


def current() -> str:
    """Return the identity of the network namespace of this process, such as net:[4026531840]."""
    return os.readlink("/proc/self/ns/net")


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = fcntl.ioctl(control, _SIOCGIFFLAGS, struct.pack(_IFREQ, b"lo", 0))
        _, flags = struct.unpack(_IFREQ, request)
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack(_IFREQ, b"lo", flags | _IFF_UP))


if __name__ == "__main__":
    main()
