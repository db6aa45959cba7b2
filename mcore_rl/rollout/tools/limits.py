"""Limits of a tool: time per call, concurrent calls, call rate, retries."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TypeVar

from mcore_rl.config.functions import describe
from mcore_rl.rollout.tools.interface import EpisodeState, Tool, ToolError, ToolResult
from mcore_rl.rollout.tools.schemas import ArgumentChecker, name_of

T = TypeVar("T")
CANCELLED_ITSELF = "the tool cancelled itself (it raised CancelledError)"
BACKOFF_SECONDS = 0.25
"""Delay before the first retry; it doubles with each retry."""
STUCK_SECONDS = 3.0
"""A call that is still running this long after its cancellation counts as stuck: a thread cannot be stopped."""
MAX_STUCK = 16
"""Number of stuck calls of a tool (at most max_running) at which its process is replaced."""
TRANSIENT = {"RetryableToolError", "ConnectionError", "TransportError", "ClientConnectionError"}
"""Names of exceptions for a failed connection, in Python, httpx, requests and aiohttp."""


@dataclass(frozen=True)
class ToolLimits:
    """Limits of a tool. `max_running` and `rate_per_second` apply to one tool process; None: no limit. `retries`:
    number of retries after a transient error."""

    timeout_seconds: float
    max_running: int | None = None
    retries: int = 2
    rate_per_second: float | None = None


class LimitedTool:
    """Tool whose calls are limited. `on_stuck` is called when stuck calls leave no slot for others."""

    def __init__(self, tool: Tool, limits: ToolLimits, on_stuck: Callable[[str], None]) -> None:
        self.tool, self.limits = tool, limits
        self.name = name_of(tool.schema)
        self._checker = ArgumentChecker(tool.schema)
        self._slots = asyncio.Semaphore(limits.max_running or sys.maxsize)
        self._next_start = 0.0
        self._stuck: set[asyncio.Task[ToolResult]] = set()
        self._on_stuck = on_stuck

    async def call(self, episode: EpisodeState, arguments: dict[str, object]) -> ToolResult:
        """Execute a call. Raises only CancelledError; other errors become text for the model."""
        if (problem := self._checker.problem(arguments)) is not None:
            return failure(problem)
        attempt = 0
        while True:
            try:
                return await self._attempt(episode, arguments)
            except ToolError as error:
                return failure(str(error) or describe(error))
            except Exception as error:  # any error of the user's tool
                names = {kind.__name__ for kind in type(error).__mro__}
                if attempt == self.limits.retries or not (isinstance(error, TimeoutError) or names & TRANSIENT):
                    return failure(describe(error))
            await asyncio.sleep(BACKOFF_SECONDS * 2**attempt)
            attempt += 1

    async def _attempt(self, episode: EpisodeState, arguments: dict[str, object]) -> ToolResult:
        await self._slots.acquire()
        try:
            await self._wait_for_rate()
        except asyncio.CancelledError:
            self._slots.release()
            raise
        task = asyncio.create_task(self._call(episode, arguments))
        task.add_done_callback(self._ended)  # the slot is freed when the call ends, not when its caller gives up
        seconds = self.limits.timeout_seconds
        try:
            # Not wait_for: after the time limit it would wait until the cancelled call has ended, which may be never.
            await asyncio.wait({task}, timeout=seconds)
        finally:
            if late := not task.done():
                self._abandon(task)
        if late:
            raise ToolError(f"the tool did not answer within {seconds:g} seconds")
        if task.cancelled():
            raise ToolError(CANCELLED_ITSELF)
        return task.result()

    async def _call(self, episode: EpisodeState, arguments: dict[str, object]) -> ToolResult:
        # In the task: a user's class whose `call` has other parameters raises here, and the slot must be freed.
        return await contained(self.tool.call(episode, arguments))

    async def _wait_for_rate(self) -> None:
        if self.limits.rate_per_second is None:
            return
        now = asyncio.get_running_loop().time()
        # Reserve the next start time before sleeping, so that concurrent calls get different times.
        start = max(now, self._next_start)
        self._next_start = start + 1 / self.limits.rate_per_second
        await asyncio.sleep(start - now)

    def _ended(self, task: asyncio.Task[ToolResult]) -> None:
        self._slots.release()
        if not task.cancelled():
            task.exception()  # mark as retrieved, since the caller may have given up

    def _abandon(self, task: asyncio.Task[ToolResult]) -> None:
        task.cancel()
        asyncio.get_running_loop().call_later(STUCK_SECONDS, self._check_stuck, task)

    def _check_stuck(self, task: asyncio.Task[ToolResult]) -> None:
        if task.done():
            return
        self._stuck.add(task)
        task.add_done_callback(self._stuck.discard)
        if len(self._stuck) >= min(MAX_STUCK, self.limits.max_running or MAX_STUCK):
            self._on_stuck(f"{len(self._stuck)} calls of {self.name} did not return")


async def contained(call: Coroutine[object, None, T]) -> T:
    """Await a call of a user's tool. Exceptions that would end the event loop become a ToolError; a CancelledError
    cancels the task that runs this.

    Raises: ToolError; other errors of the tool.
    """
    try:
        return await call
    except SystemExit:
        raise ToolError("the tool called sys.exit") from None
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:
        raise ToolError(f"the tool raised {describe(error)}") from None


def failure(reason: str) -> ToolResult:
    """Build a result that describes an error to the model."""
    return ToolResult(f"Error: {reason}", error=reason)
