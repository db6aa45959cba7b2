"""Grading process (`python -m mcore_rl.rewards.processes.worker`), started by dispatcher.GradingProcess.

Messages in: (RewardConfig, SandboxConfig) first, then lists of GradingTasks. Messages out: Ready or Refused first, then
lists of (number of a task, its scores).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection

from mcore_rl.config.functions import provide_user_files
from mcore_rl.config.reward import NAIVE, RewardConfig
from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.errors import ConfigError
from mcore_rl.processes import served
from mcore_rl.rewards.graders.loading import load_grader, needs_math
from mcore_rl.rewards.processes.limited_grader import LimitedGrader
from mcore_rl.rewards.processes.messages import GradingTask, Ready, Refused
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
        connection.send(Refused(str(error)))
        return
    if needs_math(config):
        from mcore_rl.rewards.expressions import warm_up

        warm_up()  # before Ready: imports must not take the time of the first response
    is_concurrent = grader.is_async and config.manager != NAIVE
    max_calls = config.max_concurrent_calls if is_concurrent else 1
    limited = LimitedGrader(grader, config.timeout_seconds)
    calls = ConcurrentCalls(connection, limited.grade_concurrently)
    connection.send(Ready(max_calls))
    while True:
        tasks: list[GradingTask] = connection.recv()
        if max_calls > 1 and not tasks[0].alone:
            limited.loop.run(calls.serve(tasks))
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


@dataclass
class ConcurrentCalls:
    """Concurrent grading of tasks from a connection. Each result is sent when it is ready.

    The parent limits their number. It sends a task that must run alone only after all results have arrived, when
    `serve` has returned.
    """

    connection: Connection
    grade: Callable[[GradingTask], Awaitable[list[Score]]]
    _running: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    async def serve(self, tasks: Sequence[GradingTask]) -> None:
        """Grade `tasks` and the tasks that arrive meanwhile, until none is running.

        Raises: EOFError, OSError when the parent closes the connection.
        """
        loop = asyncio.get_running_loop()
        self._end: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self.connection.fileno(), self._receive)
        try:
            self._start(tasks)
            await self._end
        finally:
            loop.remove_reader(self.connection.fileno())

    def _receive(self) -> None:
        try:
            self._start(self.connection.recv())
        except (EOFError, OSError) as error:
            self._finish(error)

    def _start(self, tasks: Sequence[GradingTask]) -> None:
        for task in tasks:
            # The set keeps the tasks alive: the event loop itself has weak references only.
            self._running.add(asyncio.get_running_loop().create_task(self._answer(task)))

    async def _answer(self, task: GradingTask) -> None:
        scores = await self.grade(task)
        this = asyncio.current_task()
        assert this is not None
        self._running.discard(this)
        if not self._running:
            # Stop reading before sending: the parent's next message belongs to the caller of `serve`.
            asyncio.get_running_loop().remove_reader(self.connection.fileno())
        try:
            self.connection.send([(task.number, scores)])
        except OSError as error:
            self._finish(error)
        if not self._running:
            self._finish(None)

    def _finish(self, error: Exception | None) -> None:
        if self._end.done():
            return
        if error is None:
            self._end.set_result(None)
        else:
            self._end.set_exception(error)


if __name__ == "__main__":
    served.run(serve)
elif __name__ == "__mp_main__":  # a process that a user's function has spawned with multiprocessing
    provide_user_files()
