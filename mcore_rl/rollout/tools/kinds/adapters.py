"""Tools made of users' functions (async on the loop, others in threads or processes), of verl's tool classes, and of
the sandbox's interpreter and shell.

In verl's versions of 2026, an instance exists for one call: create, execute, release. Earlier versions kept it for the
episode and called calc_reward at its end; select this with `lifecycle: episode` in the YAML.
"""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from mcore_rl.config.functions import describe, load_function
from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.parent_death import die_with
from mcore_rl.rollout.tools.interface import (
    EpisodeState,
    RetryableToolError,
    Tool,
    ToolResult,
    number_of,
    result_of,
    result_of_function,
)
from mcore_rl.rollout.tools.kinds.verl_names import BaseTool
from mcore_rl.rollout.tools.schemas import Schema
from mcore_rl.sandbox.interpreter import Interpreter, Shell
from mcore_rl.sandbox.local import LocalSandbox

T = TypeVar("T")
THREADS = 32
"""Default number of concurrent calls of a synchronous function."""


class FunctionTool(Tool):
    """User's function, called with keyword arguments: an async one on the loop, others in an executor. The model
    receives its result as text: strings unchanged, other values as JSON."""

    def __init__(self, function: Callable[..., Any], schema: Schema, executor: Executor | None = None) -> None:
        self.schema = schema
        self._function, self._executor = function, executor

    async def call(self, episode: EpisodeState, arguments: dict[str, object]) -> ToolResult:
        if self._executor is None:
            return await _converted(result_of_function, await self._function(**arguments))
        return await _ended(self._executor.submit(_called, self._function, arguments))

    async def close(self) -> None:
        if self._executor is not None:
            # A function that never returns must not delay the end of the process.
            self._executor.shutdown(wait=False, cancel_futures=True)


class PooledFunctionTool(FunctionTool):
    """User's CPU-bound function in separate processes; each process loads it by name."""

    def __init__(self, spec: str, schema: Schema, processes: int) -> None:
        self._processes = processes
        super().__init__(partial(_call_by_name, spec), schema, self._started())

    async def call(self, episode: EpisodeState, arguments: dict[str, object]) -> ToolResult:
        # Kept in a local variable: another call may replace a broken executor while this one waits.
        executor = self._executor
        try:
            return await super().call(episode, arguments)
        except BrokenExecutor:
            if executor is not None and self._executor is executor:  # only the first failing call replaces it
                executor.shutdown(wait=False)
                self._executor = self._started()
            raise RetryableToolError("a process of the function died") from None

    def _started(self) -> Executor:
        # Spawned, because this process has threads. The pool's processes hold both ends of their queue and would not
        # notice the end of this process, hence die_with.
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self._processes, context, initializer=die_with, initargs=(os.getpid(),))


def _call_by_name(spec: str, /, **arguments: object) -> object:
    return load_function("function", spec)(**arguments)


def _called(function: Callable[..., object], arguments: dict[str, object]) -> ToolResult:
    try:
        return result_of_function(function(**arguments))
    except StopIteration as error:  # a future cannot hold it, so the call would only end at its time limit
        raise RuntimeError("the function raised StopIteration") from error


async def _converted(convert: Callable[[object], ToolResult], returned: object) -> ToolResult:
    """Convert the return value of a function that ran on the loop."""
    response = returned[0] if isinstance(returned, tuple) and returned else returned
    if getattr(response, "image", None) is None:
        return convert(returned)
    # In a thread: encoding a large image of PIL takes seconds, in which the loop could not run other calls.
    return await asyncio.to_thread(convert, returned)


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


LIFECYCLES = ("call", "episode")


def is_verl_tool(kind: type) -> bool:
    return all(callable(getattr(kind, name, None)) for name in ("create", "execute", "release"))


class VerlTool(Tool):
    """Adapter of a tool in verl's format."""

    def __init__(self, tool: BaseTool, schema: Schema, lifecycle: str = "call") -> None:
        self.schema = schema
        self._tool = tool
        self._name = schema["function"]["name"]
        self._per_call = lifecycle == "call"

    async def call(self, episode: EpisodeState, arguments: dict[str, object]) -> ToolResult:
        if not self._per_call:
            instance = episode.state.get(self._name)
            if not isinstance(instance, str):
                instance = episode.state[self._name] = await self._create(episode)
            return await self._execute(episode, instance, arguments)
        instance = await self._create(episode)
        # The instance is released in any case. An error of release only adds to the result of a successful call.
        try:
            outcome = await self._execute(episode, instance, arguments)
        except BaseException:
            await self._release(episode, instance)
            raise
        try:
            await self._release(episode, instance)
        except Exception as error:  # any error of a user's class; the result is still valid
            return replace(outcome, error=f"release raised {describe(error)}")
        return outcome

    async def close_episode(self, episode: EpisodeState) -> float | None:
        instance = episode.state.pop(self._name, None)
        if not isinstance(instance, str):
            return None
        try:
            kwargs = episode.kwargs_of(self._name, "calc_reward_kwargs")
            calc_reward = getattr(self._tool, "calc_reward", None)
            return None if calc_reward is None else number_of(await _awaited(calc_reward(instance, **kwargs)))
        finally:
            await self._release(episode, instance)

    async def _create(self, episode: EpisodeState) -> str:
        given = episode.kwargs_of(self._name, "create_kwargs")
        create: Callable[..., object] = self._tool.create
        created = await _awaited(create(**_create_kwargs(create, given)))
        instance = created[0] if isinstance(created, tuple) else created
        if not isinstance(instance, str):
            raise TypeError(f"create returned {type(instance).__name__} instead of an instance's id")
        return instance

    async def _execute(self, episode: EpisodeState, instance: str, arguments: dict[str, object]) -> ToolResult:
        kwargs = episode.kwargs_of(self._name, "execute_kwargs")
        if _takes(self._tool.execute, "agent_data"):
            kwargs["agent_data"] = episode.agent_data
        return await _converted(result_of, await _awaited(self._tool.execute(instance, arguments, **kwargs)))

    async def _release(self, episode: EpisodeState, instance: str) -> None:
        await _awaited(self._tool.release(instance, **episode.kwargs_of(self._name, "release_kwargs")))


def _create_kwargs(create: Callable[..., object], given: dict[str, object]) -> dict[str, object]:
    """Pass the arguments in both of verl's forms, as far as `create` accepts them: as the keyword `create_kwargs`, and
    as separate keywords."""
    spread = {key: value for key, value in given.items() if key not in ("instance_id", "create_kwargs")}
    whole: dict[str, object] = {"create_kwargs": given} if _takes(create, "create_kwargs") else {}
    return whole | {key: value for key, value in spread.items() if not whole or _takes(create, key)}


def _takes(function: Callable[..., object], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


async def _awaited(value: object) -> object:
    return await value if inspect.isawaitable(value) else value


PYTHON, SHELL = "python", "shell"
NO_OUTPUT = "(no output)"
GONE = "The {} has ended ({}); the next call starts a new one without earlier definitions."


def _schema(name: str, description: str, argument: str, meaning: str) -> Schema:
    parameters = {
        "type": "object",
        "properties": {argument: {"type": "string", "description": meaning}},
        "required": [argument],
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


SCHEMAS: dict[str, Schema] = {
    PYTHON: _schema(
        PYTHON,
        "Runs Python code and returns what it prints and the value of its last expression. What is defined stays for "
        "later calls.",
        "code",
        "Python code",
    ),
    SHELL: _schema(
        SHELL,
        "Runs commands of a shell and returns what they print. Variables and the directory stay for later calls.",
        "command",
        "commands of bash",
    ),
}


class SandboxedTool(Tool):
    """Tool with the `name` python or shell. Its session lasts until the episode is closed."""

    def __init__(self, name: str, config: SandboxConfig) -> None:
        self.schema = SCHEMAS[name]
        self._name = name
        sandbox = LocalSandbox(config)
        self._start: Callable[[], Interpreter | Shell] = sandbox.interpreter if name == PYTHON else sandbox.shell
        self._sessions: dict[str, Interpreter | Shell] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        """One lock per episode, since its cells run one after another."""

    async def call(self, episode: EpisodeState, arguments: dict[str, object]) -> ToolResult:
        (code,) = arguments.values()
        async with self._locks.setdefault(episode.id, asyncio.Lock()):
            session = self._sessions.get(episode.id)
            # A session ends, for example, at a time limit; the next call of the episode starts a new one.
            if session is None or not session.alive:
                session = self._sessions[episode.id] = await asyncio.to_thread(self._start)
            found = await asyncio.to_thread(session.cell, str(code))
        text = found.output or NO_OUTPUT
        if not session.alive:
            text = f"{text}\n{GONE.format(self._name, found.why)}"
        return ToolResult(text, error=None if found.ok else f"{self._name}: {found.why}")

    async def close_episode(self, episode: EpisodeState) -> float | None:
        self._locks.pop(episode.id, None)
        session = self._sessions.pop(episode.id, None)
        if session is not None:
            await asyncio.to_thread(session.close)
        return None
