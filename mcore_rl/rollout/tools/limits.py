"""A tool with its limits: how long a call may take, how many run, how often they begin, what is tried again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from mcore_rl.config.functions import describe
from mcore_rl.rollout.tools.interface import Episode, Outcome, RetryableToolError, Tool, ToolError
from mcore_rl.rollout.tools.schemas import ArgumentChecker, name_of

T = TypeVar("T")
CANCELLED_ITSELF = "the tool cancelled itself (it raised CancelledError)"
BACKOFF_SECONDS = 0.25
"""Before the first further attempt; twice as long before each one after it."""
STUCK_SECONDS = 3.0
"""A call that has not ended so long after it was cancelled does not return: a thread cannot be stopped."""
MAX_STUCK = 16
"""Of a tool's calls, or as many as may run at once: then its process has to be replaced."""
TRANSIENT = {"RetryableToolError", "ConnectionError", "TransportError", "ClientConnectionError"}
"""Names of exceptions, of Python's, httpx's, requests' and aiohttp's, of a connection that failed."""


@dataclass(frozen=True)
class Limits:
    """`max_running` and `rate_per_second`: of the calls in one tool process; None: no limit. `retries`: further
    attempts after an error that may pass."""

    timeout_seconds: float
    max_running: int | None = None
    retries: int = 2
    rate_per_second: float | None = None


class LimitedTool:
    """Calls a tool within its limits. `on_stuck` is told when so many calls do not return that others cannot run."""

    def __init__(self, tool: Tool, limits: Limits, on_stuck: Callable[[str], None]) -> None:
        self.tool, self.limits = tool, limits
        self.schema = tool.schema
        self.name = name_of(tool.schema)
        self._checker = ArgumentChecker(tool.schema)
        self._slots = asyncio.Semaphore(limits.max_running) if limits.max_running else None
        self._next_start = 0.0
        self._stuck = 0
        self._on_stuck = on_stuck

    async def call(self, episode: Episode, arguments: dict[str, Any]) -> Outcome:
        """Raises nothing but CancelledError: an error becomes text for the model."""
        if (problem := self._checker.problem(arguments)) is not None:
            return failure(problem)
        attempt = 0
        while True:
            try:
                return await self._attempt(episode, arguments)
            except TimeoutError as error:
                return failure(str(error) or describe(error))
            except ToolError as error:
                return failure(str(error))
            except Exception as error:  # whatever the user's tool raises
                if attempt == self.limits.retries or not is_transient(error):
                    return failure(describe(error))
            await asyncio.sleep(BACKOFF_SECONDS * 2**attempt)
            attempt += 1

    async def _attempt(self, episode: Episode, arguments: dict[str, Any]) -> Outcome:
        if self._slots is not None:
            await self._slots.acquire()
        try:
            await self._turn()
        except asyncio.CancelledError:
            self._leave()
            raise
        task = asyncio.create_task(self._call(episode, arguments))
        task.add_done_callback(self._ended)  # its place is free when it has ended, not when nobody waits any more
        seconds = self.limits.timeout_seconds
        try:
            done, _ = await asyncio.wait({task}, timeout=seconds)
        except asyncio.CancelledError:
            self._abandon(task)
            raise
        if not done:
            self._abandon(task)
            raise TimeoutError(f"the tool did not answer within {seconds:g} seconds")
        if task.cancelled():
            raise ToolError(CANCELLED_ITSELF)
        return task.result()

    async def _call(self, episode: Episode, arguments: dict[str, Any]) -> Outcome:
        try:
            return await contained(self.tool.call(episode, arguments))
        except TimeoutError as error:  # of the tool's own; not one of the limit here
            raise RetryableToolError(describe(error)) from error

    async def _turn(self) -> None:
        if self.limits.rate_per_second is None:
            return
        now = asyncio.get_running_loop().time()
        start = max(now, self._next_start)
        self._next_start = start + 1 / self.limits.rate_per_second
        await asyncio.sleep(start - now)

    def _leave(self) -> None:
        if self._slots is not None:
            self._slots.release()

    def _ended(self, task: asyncio.Task[Outcome]) -> None:
        self._leave()
        if not task.cancelled():
            task.exception()  # nobody may be waiting for it any more

    def _abandon(self, task: asyncio.Task[Outcome]) -> None:
        task.cancel()
        asyncio.get_running_loop().call_later(STUCK_SECONDS, self._look_at, task)

    def _look_at(self, task: asyncio.Task[Outcome]) -> None:
        if task.done():
            return
        self._stuck += 1
        task.add_done_callback(self._came_back)
        if self._stuck >= min(MAX_STUCK, self.limits.max_running or MAX_STUCK):
            self._on_stuck(f"{self._stuck} calls of {self.name} did not return")

    def _came_back(self, task: asyncio.Task[Outcome]) -> None:
        self._stuck -= 1


async def contained(call: Coroutine[Any, Any, T]) -> T:
    """The result of a call into a user's tool. Exceptions that would end the event loop, or that no handler expects,
    become a ToolError; a CancelledError cancels the task that runs this.

    Raises: ToolError; whatever else the tool raises.
    """
    try:
        return await call
    except SystemExit:
        raise ToolError("the tool called sys.exit") from None
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:
        raise ToolError(f"the tool raised {describe(error)}") from None


def failure(reason: str) -> Outcome:
    """An answer that tells the model what went wrong."""
    return Outcome(f"Error: {reason}", error=reason)


def is_transient(error: BaseException) -> bool:
    return any(kind.__name__ in TRANSIENT for kind in type(error).__mro__)
