"""Grading process (`python -m mcore_rl.rewards.processes.worker`), started by dispatcher.GradingProcess.

Messages in: (RewardConfig, SandboxConfig) first, then lists of GradingTasks. Messages out: the number of tasks that the
process grades concurrently, or the ConfigError of a grader that does not load; then lists of (number of a task, its
scores).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection

from mcore_rl.config.functions import provide_user_files
from mcore_rl.config.reward import NAIVE, RewardConfig
from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.errors import ConfigError
from mcore_rl.processes import served
from mcore_rl.rewards.graders.loading import load_grader, needs_math
from mcore_rl.rewards.processes.limited_grader import GradingTask, LimitedGrader
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
        grader = load_grader(config, sandbox)
    except ConfigError as error:
        connection.send(ConfigError(str(error)))
        return
    if needs_math(config):
        from mcore_rl.rewards.expressions import warm_up

        warm_up()  # before the first message: imports must not take the time of the first response
    is_concurrent = grader.is_async and config.manager != NAIVE
    max_calls = config.max_concurrent_calls if is_concurrent else 1
    limited = LimitedGrader(grader, config.timeout_seconds)
    connection.send(max_calls)
    while True:
        tasks: list[GradingTask] = connection.recv()
        if max_calls > 1 and not tasks[0].alone:
            limited.loop.run(_grade_concurrently(connection, limited, tasks))
        else:
            _grade_batch(connection, limited, tasks)


def _grade_batch(connection: Connection, limited: LimitedGrader, tasks: list[GradingTask]) -> None:
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


async def _grade_concurrently(connection: Connection, limited: LimitedGrader, tasks: Sequence[GradingTask]) -> None:
    """Grade `tasks` and the tasks that arrive meanwhile, until none is running. Each result is sent when it is ready.

    The parent limits their number. It sends a task that must run alone only after all results have arrived, when this
    function no longer reads from the connection.

    Raises: EOFError, OSError when the parent closes the connection.
    """
    loop, changed = asyncio.get_running_loop(), asyncio.Event()
    running: dict[asyncio.Task[list[Score]], int] = {}
    loop.add_reader(connection.fileno(), changed.set)
    try:
        while tasks or running:
            for task in tasks:
                call = loop.create_task(limited.grade_concurrently(task))
                call.add_done_callback(lambda _: changed.set())
                running[call] = task.number
            await changed.wait()
            changed.clear()
            if done := [call for call in running if call.done()]:
                connection.send([(running.pop(call), call.result()) for call in done])
            tasks = connection.recv() if running and connection.poll() else []
    finally:
        loop.remove_reader(connection.fileno())


if __name__ == "__main__":
    served.run(serve)
elif __name__ == "__mp_main__":  # a process that a user's function has spawned with multiprocessing
    provide_user_files()
