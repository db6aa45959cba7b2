"""Event loop for async reward functions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class EventLoop:
    """One event loop for all calls of a process: a module may keep objects of the loop, such as an HTTP session.

    Interrupting a call closes the loop and cancels everything that the call has started.
    """

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None
        self._cancelled: asyncio.CancelledError | None = None

    def run(self, awaitable: Awaitable[T]) -> T:
        """Wait for the result.

        Raises: errors of the awaitable; an interrupting exception, whose cause shows where the call was waiting.
        """
        if self._runner is None:
            self._runner = asyncio.Runner()
        self._cancelled = None
        try:
            return self._runner.run(self._result_of(awaitable))
        except Exception:
            raise
        except BaseException as interrupt:  # DeadlineExceeded, or SystemExit of the user's function
            runner, self._runner = self._runner, None
            runner.close()  # cancels pending tasks
            raise interrupt from self._cancelled

    async def _result_of(self, awaitable: Awaitable[T]) -> T:
        try:
            return await awaitable
        except asyncio.CancelledError as error:
            self._cancelled = error
            raise
