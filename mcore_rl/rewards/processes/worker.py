"""A grading process: `python -m mcore_rl.rewards.processes.worker FD PARENT_PID`, started and fed by rewards.pool.

Messages, one pickled object each. In: the RewardConfig; then lists of (key, pickled Sample). Out: READY or
(REFUSED, cause); then lists of (key, Score), in the order of the samples.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import resource
import signal
import sys
import time
from dataclasses import replace
from multiprocessing.connection import Connection

from mcore_rl.config.functions import describe
from mcore_rl.config.reward import RewardConfig
from mcore_rl.errors import ConfigError
from mcore_rl.rewards.functions import BUILTIN, Grader, failed, load_grader
from mcore_rl.rewards.processes.deadline import Deadline, DeadlineExceeded
from mcore_rl.rewards.processes.tracebacks import traceback_of
from mcore_rl.types import Score

READY = "ready"
REFUSED = "refused"
FLUSH_SECONDS = 0.1
"""A finished score waits at most this long (and until the sample that is being graded is done)."""
PR_SET_PDEATHSIG = 1


def main() -> None:
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    _die_with(parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.set_inheritable(descriptor, False)
    parent_gone = contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError)
    with Connection(descriptor) as connection, parent_gone:
        serve(connection)


def serve(connection: Connection) -> None:
    """Grades batches until the other end closes. Raises: EOFError."""
    config: RewardConfig = connection.recv()
    try:
        grader = load_grader(config)
    except ConfigError as error:
        connection.send((REFUSED, str(error)))
        return
    if config.function == BUILTIN:
        from mcore_rl.rewards.math_grader import warm_up

        warm_up()
    deadline = Deadline(config.timeout_seconds)
    connection.send(READY)
    while True:
        _grade_batch(connection, grader, deadline, connection.recv())


def _grade_batch(connection: Connection, grader: Grader, deadline: Deadline, batch: list[tuple[int, bytes]]) -> None:
    finished: list[tuple[int, Score]] = []
    flushed = time.monotonic()
    for key, pickled in batch:
        if finished and time.monotonic() - flushed > FLUSH_SECONDS:
            connection.send(finished)
            finished, flushed = [], time.monotonic()
        score = _grade(grader, deadline, pickled)
        if score.traceback and any(before.traceback for _, before in finished):
            score = replace(score, traceback=None)  # one is enough, of the many that a broken grader would send
        finished.append((key, score))
    connection.send(finished)


def _grade(grader: Grader, deadline: Deadline, pickled: bytes) -> Score:
    try:
        return deadline.call(lambda: grader(pickle.loads(pickled)))
    except DeadlineExceeded as error:
        limit = f"reward.timeout_seconds={deadline.seconds:g}"
        return failed(f"the grader did not finish within {limit}", traceback_of(error))
    except BaseException as error:  # a grader's SystemExit too costs its sample only
        return failed(f"the grader raised {describe(error)}", traceback_of(error))


def _die_with(parent: int) -> None:
    """Asks the kernel to kill this process when the thread that started it ends (Linux); an idle worker elsewhere
    notices the closed connection."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


if __name__ == "__main__":
    main()
