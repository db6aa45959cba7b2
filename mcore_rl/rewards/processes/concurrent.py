"""Many calls of async functions under way in one grading process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing.connection import Connection

from mcore_rl.rewards.processes.messages import Task
from mcore_rl.types import Score


class ConcurrentCalls:
    """Grades tasks from a connection side by side, and answers each when it is graded.

    How many there are at a time is up to who sends them. A task that has to be alone is none of them: it is sent when
    all answers have come, and by then nobody reads here.
    """

    def __init__(self, connection: Connection, grade: Callable[[Task], Awaitable[list[Score]]]) -> None:
        self._connection = connection
        self._grade = grade
        self._running: set[asyncio.Task[None]] = set()

    async def serve(self, tasks: Sequence[Task]) -> None:
        """Grades `tasks` and those that come meanwhile, until none is left.

        Raises: EOFError, OSError when the other end is closed.
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
            # Before the answer: what comes after the last one is for who serves next.
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
