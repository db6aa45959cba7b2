"""Stack dumps of the processes of a run: each writes the stacks of its threads to a file of its own on request.

A thread of the process waits for requests at a socket and writes the stacks while it holds the interpreter lock, so no
other thread runs Python meanwhile. It also answers while the main thread waits in native code. A process in which
native code keeps the lock cannot answer; for it, SIGUSR2 has a handler in C (faulthandler). That handler reads the
stacks of threads that may be running, which has ended processes, so it is the last resort. Child processes inherit the
place of their files in the environment.

SGLang's ranks import this module in SGLang's environment, so it needs the standard library only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import threading
from pathlib import Path

SIGNAL = signal.SIGUSR2
SUFFIX = ".stacks"
VARIABLE = "MCORE_RL_STACKS"
"""Environment variable: path of the process's file without SUFFIX."""
_registered: list[int] = []
"""Open file of this process's dumps; faulthandler keeps only its number."""
_answering: set[int] = set()
"""Process ids with a thread that answers; a forked child has none."""


def write_stacks_to(path: Path) -> None:
    """Append the stacks of all threads of this process to `path` plus SUFFIX on each request from now on (see
    stack_requests.py), and set VARIABLE for child processes."""
    file = open_stacks(path)
    faulthandler.register(SIGNAL, file=file, all_threads=True)
    earlier = _registered.copy()
    _registered[:] = [file]
    for each in earlier:
        os.close(each)
    if os.getpid() not in _answering:
        requests = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            requests.bind(address_of(os.getpid()))
        except OSError:
            # A run must not fail for its dumps. This process has the signal's handler only.
            requests.close()
            return
        _answering.add(os.getpid())
        threading.Thread(target=_answer, args=(requests,), name="stacks", daemon=True).start()


def address_of(pid: int) -> bytes:
    """Return the address at which a process of this PID namespace takes requests: an abstract Unix socket.

    Containers may share a network, and with it these addresses, but not their process ids.
    """
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return f"\0mcore_rl.stacks.{namespace}.{pid}".encode()


def _answer(requests: socket.socket) -> None:
    while True:
        number, sender = requests.recvfrom(32)
        for file in _registered:
            faulthandler.dump_traceback(file, all_threads=True)
        # A requester that has not waited is gone.
        with contextlib.suppress(OSError):
            requests.sendto(number, sender)


def open_stacks(path: Path) -> int:
    """Open `path` plus SUFFIX for appending, and set VARIABLE for child processes. Returns the file's number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    os.environ[VARIABLE] = str(path)
    return os.open(f"{path}{SUFFIX}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def write_child_stacks() -> None:
    """Do the same in a child process, with its process id in the name of the file, if the parent has a file."""
    if parent := os.environ.get(VARIABLE):
        # On a full disk, the child works without.
        with contextlib.suppress(OSError):
            write_stacks_to(_path_of_child(parent, os.getpid()))


def remove_child_stacks(pid: int) -> None:
    """Remove the file of a child that has ended, if it is empty: workers may be replaced many times."""
    if parent := os.environ.get(VARIABLE):
        _remove_if_empty(Path(f"{_path_of_child(parent, pid)}{SUFFIX}"))


def handles_signal(pid: int) -> bool:
    """Return whether a process has a handler of SIGNAL."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                # Bit n - 1 belongs to signal n.
                return bool(int(line.split()[1], 16) >> (SIGNAL - 1) & 1)
    return False


def remove_empty(directory: Path) -> None:
    """Remove the files of processes that have written no stacks."""
    for path in directory.glob(f"*{SUFFIX}"):
        _remove_if_empty(path)


def _remove_if_empty(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.stat().st_size == 0:
            path.unlink()


def _path_of_child(parent: str, pid: int) -> Path:
    return Path(f"{parent}_{pid}")
