"""Grading process (`python -m mcore_rl.rewards.processes.worker`), started by process.GradingProcess.

Messages in: (RewardConfig, SandboxConfig) first, then lists of Tasks. Messages out: Ready or Refused first, then lists
of (number of a task, its scores).
"""

from __future__ import annotations

import time
from dataclasses import replace
from multiprocessing.connection import Connection

from mcore_rl.config.reward import NAIVE, RewardConfig
from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.config.user_files import provide_user_files
from mcore_rl.errors import ConfigError
from mcore_rl.processes import served
from mcore_rl.rewards.graders.loading import load_grader, needs_math
from mcore_rl.rewards.graders.sandboxed import SandboxRunner
from mcore_rl.rewards.processes.concurrent_calls import ConcurrentCalls
from mcore_rl.rewards.processes.limited_grader import LimitedGrader
from mcore_rl.rewards.processes.messages import Ready, Refused, Task
from mcore_rl.types import Score

FLUSH_SECONDS = 0.1
"""A finished score waits at most this long, and until the current sample is graded, before it is sent."""


def serve(connection: Connection) -> None:
    """Grade tasks until the parent closes the connection.

    Raises: EOFError.
    """
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
    is_concurrent = grader.is_async and config.manager != NAIVE
    max_calls = config.max_concurrent_calls if is_concurrent else 1
    limited = LimitedGrader(grader, config.timeout_seconds)
    calls = ConcurrentCalls(connection, limited.grade_concurrently)
    connection.send(Ready(max_calls))
    while True:
        tasks: list[Task] = connection.recv()
        if max_calls > 1 and not tasks[0].alone:
            limited.loop.run(calls.serve(tasks))
        else:
            _grade_batch(connection, limited, tasks)


def _grade_batch(connection: Connection, limited: LimitedGrader, tasks: list[Task]) -> None:
    finished: list[tuple[int, list[Score]]] = []
    flushed, shown = time.monotonic(), False
    for task in tasks:
        if finished and time.monotonic() - flushed > FLUSH_SECONDS:
            connection.send(finished)
            finished, flushed, shown = [], time.monotonic(), False
        scores = limited.grade(task)
        if shown:
            scores = [replace(score, traceback=None) for score in scores]  # one traceback per message is enough
        shown = shown or any(score.traceback for score in scores)
        finished.append((task.number, scores))
    connection.send(finished)


if __name__ == "__main__":
    served.run(serve)
elif __name__ == "__mp_main__":  # a process that a user's function has spawned with multiprocessing
    provide_user_files()
