"""Processes that end with their parent: `python -m mcore_rl.parent_death PARENT CMD...` runs a command that Linux kills
when the thread that started it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def guarded(*command: str) -> list[str]:
    """Return a command that runs `command` in a process that ends with this thread."""
    return [sys.executable, "-m", __name__, str(os.getpid()), *command]


def die_with(parent: int) -> None:
    """Let the kernel kill this process when the thread that started it ends (Linux). The setting survives exec.

    Exits immediately if the process `parent` has already ended.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before prctl took effect
        os._exit(1)


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"{sys.argv[2]} cannot be started: {error}")
