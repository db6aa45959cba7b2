"""Stack dumps of the processes of a run: each writes the stacks of its threads to a file of its own on SIGUSR2.

The signal handler is C code (faulthandler), so a dump also works while a thread holds the interpreter lock or waits in
native code. Child processes inherit the place of their files in the environment.

SGLang's ranks import this module in SGLang's environment, so it needs the standard library only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from pathlib import Path

SIGNAL = signal.SIGUSR2
SUFFIX = ".stacks"
VARIABLE = "MCORE_RL_STACKS"
"""Environment variable: path of the process's file without SUFFIX."""
_registered: list[int] = []
"""Open file of this process's dumps; faulthandler keeps only its number."""


def write_stacks_to(path: Path) -> None:
    """Append the stacks of all threads of this process to `path` plus SUFFIX on each SIGUSR2 from now on, and set
    VARIABLE for child processes."""
    file = open_stacks(path)
    faulthandler.register(SIGNAL, file=file, all_threads=True)
    _close_earlier()
    _registered.append(file)


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


def _close_earlier() -> None:
    while _registered:
        os.close(_registered.pop())


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
