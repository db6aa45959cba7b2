"""Processes that end with the one that started them: `python -m mcore_rl.parent_death PARENT CMD...` runs
a command so that Linux kills it when the thread that started it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Asks the kernel to kill this process when the thread that started it ends (Linux). It holds over an exec."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"{sys.argv[2]} cannot be started: {error}")
