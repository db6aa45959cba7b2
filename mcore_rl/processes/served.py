"""Child side of processes that serve their parent.

SGLang's ranks import this module in SGLang's environment, so it needs the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import TypeVar

from mcore_rl.errors import McoreRLError
from mcore_rl.parent_death import die_with
from mcore_rl.processes.stacks import write_child_stacks

Message = TypeVar("Message")
OK, REFUSED, FAILED = "ok", "refused", "failed"
TRACE_LINES = 12
"""Number of lines of a traceback that are sent: the innermost calls and the error."""


def parent_socket() -> socket.socket:
    """Set up this process as a child of child.start_module and return the socket to its parent.

    The child ignores Ctrl-C, which the parent handles, ends with its parent, writes no core dump, and writes its stacks
    on request.
    """
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.set_inheritable(descriptor, False)
    write_child_stacks()
    return socket.socket(fileno=descriptor)


def run(serve: Callable[[Connection], None]) -> None:
    """Run `serve` on the connection to the parent until it returns or the parent closes the connection."""
    parent_gone = contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError)
    with Connection(parent_socket().detach()) as connection, parent_gone:
        serve(connection)


def serve_calls(connection: Connection, function: Callable[[Message], object]) -> None:
    """Answer every message with function(message), as pool.Worker expects.

    Raises: EOFError when the parent closes the connection.
    """
    while True:
        answer(connection, partial(function, connection.recv()))


def answer(connection: Connection, call: Callable[[], object]) -> None:
    """Send the outcome of a call."""
    # Sending pickles the result before it writes, so an error leaves the stream intact.
    kind, content = outcome(lambda: connection.send((OK, call())))
    if kind != OK:
        connection.send((kind, content))


def outcome(call: Callable[[], object]) -> tuple[str, object]:
    """Return (OK, result), (REFUSED, (type, text)) for a McoreRLError, or (FAILED, end of the traceback) for any other
    error."""
    try:
        return OK, call()
    except McoreRLError as error:
        return REFUSED, (type(error), str(error))
    except Exception as error:
        lines = "".join(traceback.format_exception(error)).splitlines()
        return FAILED, "\n".join(lines[-TRACE_LINES:])
