"""Concurrent calls of async reward functions in one grading process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing.connection import Connection

from mcore_rl.rewards.processes.messages import Task
from mcore_rl.types import Score


class ConcurrentCalls:
    """Concurrent grading of tasks from a connection. Each result is sent when it is ready.

    The parent limits their number. It sends a task that must run alone only after all results have arrived, when
    `serve` has returned.
    """

    def __init__(self, connection: Connection, grade: Callable[[Task], Awaitable[list[Score]]]) -> None:
        self._connection = connection
        self._grade = grade
        self._running: set[asyncio.Task[None]] = set()

    async def serve(self, tasks: Sequence[Task]) -> None:
        """Grade `tasks` and the tasks that arrive meanwhile, until none is running.

        Raises: EOFError, OSError when the parent closes the connection.
        """
        loop = asyncio.get_running_loop()
        self._end: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._connection.fileno(), self._receive)
        try:
            self._start(tasks)
            await self._end
        finally:
            loop.remove_reader(self._connection.fileno())

    def _receive(self) -> None:
        try:
            self._start(self._connection.recv())
        except (EOFError, OSError) as error:
            self._finish(error)

    def _start(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            self._running.add(asyncio.get_running_loop().create_task(self._answer(task)))

    async def _answer(self, task: Task) -> None:
        scores = await self._grade(task)
        this = asyncio.current_task()
        assert this is not None
        self._running.discard(this)
        if not self._running:
            # Stop reading before sending: the parent's next message belongs to the caller of `serve`.
            asyncio.get_running_loop().remove_reader(self._connection.fileno())
        try:
            self._connection.send([(task.number, scores)])
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
