"""Plain functions as tools: asynchronous ones on the loop, others in threads, or in processes of their own."""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

from mcore_rl.config.functions import load_function
from mcore_rl.parent_death import die_with
from mcore_rl.rollout.tools.interface import Episode, Outcome, RetryableToolError
from mcore_rl.rollout.tools.kinds.outcomes import outcome_of_function
from mcore_rl.rollout.tools.schemas import Schema

THREADS = 32
"""Of a function that is not asynchronous: as many of its calls run at once, unless max_running says less."""


def is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function)


class FunctionTool:
    """A function of the user's, called with the arguments by name. What it returns is shown as text: a string as it is,
    anything else as JSON."""

    def __init__(self, function: Callable[..., Any], schema: Schema, threads: int = THREADS) -> None:
        self.schema = schema
        self._function = function
        self._executor = None if is_async(function) else ThreadPoolExecutor(threads, thread_name_prefix="tool")

    async def call(self, episode: Episode, arguments: dict[str, Any]) -> Outcome:
        if self._executor is None:
            return outcome_of_function(await self._function(**arguments))
        return outcome_of_function(await _ended(self._executor.submit(_called, self._function, arguments)))

    async def close_episode(self, episode: Episode) -> float | None:
        return None

    async def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)


class PooledFunctionTool:
    """A function of the user's in processes of its own, for what keeps a CPU busy; each loads it by its name."""

    def __init__(self, spec: str, schema: Schema, processes: int) -> None:
        self.schema = schema
        self._spec, self._processes = spec, processes
        self._executor: Executor = self._started()

    async def call(self, episode: Episode, arguments: dict[str, Any]) -> Outcome:
        executor = self._executor
        try:
            return await _ended(executor.submit(_call_by_name, self._spec, arguments))  # type: ignore[no-any-return]
        except BrokenExecutor:
            if self._executor is executor:  # the first of its calls to see it
                executor.shutdown(wait=False)
                self._executor = self._started()
            raise RetryableToolError("a process of the function died") from None

    async def close_episode(self, episode: Episode) -> float | None:
        return None

    async def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _started(self) -> Executor:
        # Not forked: this process has threads. The pool's processes hold both ends of their queue, so that the end of
        # this one is not told to them by it.
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self._processes, context, initializer=die_with, initargs=(os.getpid(),))


def _call_by_name(spec: str, arguments: dict[str, Any]) -> Outcome:
    return outcome_of_function(_called(load_function("function", spec), arguments))


def _called(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    try:
        return function(**arguments)
    except StopIteration as error:  # no future takes it: the call would end by its time limit
        raise RuntimeError("the function raised StopIteration") from error


async def _ended(job: Future[Any]) -> Any:
    """The result of what runs elsewhere. When the call is cancelled it goes on until that has ended too: what runs
    holds its place among the running calls, and one that never ends is noticed."""
    result = asyncio.wrap_future(job)
    try:
        return await asyncio.shield(result)
    except asyncio.CancelledError:
        if not job.cancel():  # of `result` it would be believed that it was
            await asyncio.wait({result})
            result.exception()  # nobody is told any more
        raise
