"""Runs what an async reward function returned, one call after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class EventLoop:
    """One loop for all calls of a process: what a module keeps between them, such as an HTTP session, belongs to it.

    A call that is interrupted takes the loop with it, and all that it has started there.
    """

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None
        self._cancelled: asyncio.CancelledError | None = None

    def run(self, awaitable: Awaitable[T]) -> T:
        """Raises: what it raises; what interrupts it, with a cause that says where it was waiting."""
        if self._runner is None:
            self._runner = asyncio.Runner()
        self._cancelled = None
        try:
            return self._runner.run(self._result_of(awaitable))
        except Exception:
            raise
        except BaseException as interrupt:  # the deadline, or a SystemExit of the user's
            runner, self._runner = self._runner, None
            runner.close()  # cancels what is pending
            raise interrupt from self._cancelled

    async def _result_of(self, awaitable: Awaitable[T]) -> T:
        try:
            return await awaitable
        except asyncio.CancelledError as error:
            self._cancelled = error
            raise
