"""A grading process: `python -m mcore_rl.rewards.processes.worker FD PARENT_PID`, started and fed by rewards.pool.

Messages, one pickled object each. In: RewardConfig and SandboxConfig; then lists of Tasks. Out: Ready or Refused; then
lists of (number of a task, its scores).
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import time
from dataclasses import replace
from multiprocessing.connection import Connection

from mcore_rl.config.reward import NAIVE, RewardConfig
from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.config.user_files import provide_user_files
from mcore_rl.errors import ConfigError
from mcore_rl.parent_death import die_with
from mcore_rl.rewards.graders.loading import load_grader, needs_math
from mcore_rl.rewards.graders.sandboxed import SandboxRunner
from mcore_rl.rewards.processes.concurrent import ConcurrentCalls
from mcore_rl.rewards.processes.guarded import Guarded
from mcore_rl.rewards.processes.messages import Ready, Refused, Task
from mcore_rl.types import Score

FLUSH_SECONDS = 0.1
"""A finished score waits at most this long (and until the sample that is being graded is done)."""


def main() -> None:
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    die_with(parent)  # elsewhere than on Linux an idle one notices the closed connection
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.set_inheritable(descriptor, False)
    parent_gone = contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError)
    with Connection(descriptor) as connection, parent_gone:
        serve(connection)


def serve(connection: Connection) -> None:
    """Grades tasks until the other end closes. Raises: EOFError."""
    config: RewardConfig
    sandbox: SandboxConfig
    config, sandbox = connection.recv()
    try:
        grader = load_grader(config, SandboxRunner(sandbox))
    except ConfigError as error:
        connection.send(Refused(str(error)))
        return
    if needs_math(config):
        from mcore_rl.rewards.math_grader import warm_up

        warm_up()
    together = grader.is_async and config.manager != NAIVE
    max_calls = config.max_concurrent_calls if together else 1
    guarded = Guarded(grader, config.timeout_seconds)
    calls = ConcurrentCalls(connection, guarded.grade_beside_others)
    connection.send(Ready(max_calls))
    while True:
        tasks: list[Task] = connection.recv()
        if max_calls > 1 and not tasks[0].alone:
            guarded.loop.run(calls.serve(tasks))
        else:
            _grade_batch(connection, guarded, tasks)


def _grade_batch(connection: Connection, guarded: Guarded, tasks: list[Task]) -> None:
    finished: list[tuple[int, list[Score]]] = []
    flushed, shown = time.monotonic(), False
    for task in tasks:
        if finished and time.monotonic() - flushed > FLUSH_SECONDS:
            connection.send(finished)
            finished, flushed, shown = [], time.monotonic(), False
        scores = guarded.grade(task)
        if shown:
            scores = [replace(score, traceback=None) for score in scores]  # one is enough of those of a broken grader
        shown = shown or any(score.traceback for score in scores)
        finished.append((task.number, scores))
    connection.send(finished)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # a process that a user's function has spawned with multiprocessing
    provide_user_files()
