"""Main functions of child processes that serve their parent (child.start_module)."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

from mcore_rl.parent_death import die_with


def parent_socket() -> socket.socket:
    """Set up this process as a child and return the socket to its parent.

    The child ignores Ctrl-C, which the parent handles, ends with its parent, and writes no core dump.
    """
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.set_inheritable(descriptor, False)
    return socket.socket(fileno=descriptor)


def run(serve: Callable[[Connection], None]) -> None:
    """Run `serve` on the connection to the parent until it returns or the parent closes the connection."""
    parent_gone = contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError)
    with Connection(parent_socket().detach()) as connection, parent_gone:
        serve(connection)
