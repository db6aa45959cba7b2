"""Functions as tools: async functions on the loop, others in threads or in separate processes."""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any, TypeVar

from mcore_rl.config.functions import load_function
from mcore_rl.parent_death import die_with
from mcore_rl.rollout.tools.interface import EpisodeState, RetryableToolError, Tool, ToolResult, result_of_function
from mcore_rl.rollout.tools.schemas import Schema

T = TypeVar("T")
THREADS = 32
"""Default number of concurrent calls of a synchronous function."""


def is_async(function: Callable[..., object]) -> bool:
    return inspect.iscoroutinefunction(function)


class FunctionTool(Tool):
    """User's function, called with keyword arguments. The model receives its result as text: strings unchanged, other
    values as JSON."""

    def __init__(self, function: Callable[..., Any], schema: Schema, threads: int = THREADS) -> None:
        self.schema = schema
        self._function = function
        self._executor = None if is_async(function) else ThreadPoolExecutor(threads, thread_name_prefix="tool")

    async def call(self, episode: EpisodeState, arguments: dict[str, object]) -> ToolResult:
        if self._executor is None:
            return result_of_function(await self._function(**arguments))
        return result_of_function(await _ended(self._executor.submit(_called, self._function, arguments)))

    async def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)


class PooledFunctionTool(Tool):
    """User's CPU-bound function in separate processes; each process loads it by name."""

    def __init__(self, spec: str, schema: Schema, processes: int) -> None:
        self.schema = schema
        self._spec, self._processes = spec, processes
        self._executor: Executor = self._started()

    async def call(self, episode: EpisodeState, arguments: dict[str, object]) -> ToolResult:
        # Kept in a local variable: another call may replace a broken executor while this one waits.
        executor = self._executor
        try:
            return await _ended(executor.submit(_call_by_name, self._spec, arguments))
        except BrokenExecutor:
            if self._executor is executor:  # only the first failing call replaces it
                executor.shutdown(wait=False)
                self._executor = self._started()
            raise RetryableToolError("a process of the function died") from None

    async def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _started(self) -> Executor:
        # Spawned, because this process has threads. The pool's processes hold both ends of their queue and would not
        # notice the end of this process, hence die_with.
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self._processes, context, initializer=die_with, initargs=(os.getpid(),))


def _call_by_name(spec: str, arguments: dict[str, object]) -> ToolResult:
    return result_of_function(_called(load_function("function", spec), arguments))


def _called(function: Callable[..., object], arguments: dict[str, object]) -> object:
    try:
        return function(**arguments)
    except StopIteration as error:  # a future cannot hold it, so the call would only end at its time limit
        raise RuntimeError("the function raised StopIteration") from error


async def _ended(job: Future[T]) -> T:
    """Wait for a job in another thread or process. If the call is cancelled, wait until the job has ended, so that it
    keeps its slot, and a job that never ends is detected."""
    result = asyncio.wrap_future(job)
    try:
        return await asyncio.shield(result)
    except asyncio.CancelledError:
        if not job.cancel():  # cancelling `result` would succeed although the job keeps running
            await asyncio.wait({result})
            result.exception()  # mark as retrieved
        raise
