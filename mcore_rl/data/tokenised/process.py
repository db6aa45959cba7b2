"""A tokenising process: `python -m mcore_rl.data.tokenised.process FD PARENT_PID`, started and fed by `processes`.

Messages, one pickled object of ours each. In: the BlockTokeniser; then blocks of rows. Out: for each, its Block, or the
DataError that it has; anything else ends the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from multiprocessing.connection import Connection

from mcore_rl.errors import DataError
from mcore_rl.parent_death import die_with


def main() -> None:
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    die_with(parent)
    os.set_inheritable(descriptor, False)
    parent_gone = contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError)
    with Connection(descriptor) as connection, parent_gone:
        _serve(connection)


def _serve(connection: Connection) -> None:
    """Raises: EOFError when the other end closes."""
    tokeniser = connection.recv()
    while True:
        block = connection.recv()
        try:
            connection.send(tokeniser.tokenise(block))
        except DataError as error:
            connection.send(error)


if __name__ == "__main__":
    main()
