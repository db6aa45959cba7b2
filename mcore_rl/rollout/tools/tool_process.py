"""Parent side of a process that runs tools: calls, answers, and detection of a dead or hanging process."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

from mcore_rl.errors import ConfigError, McoreRLError, WorkerDiedError
from mcore_rl.processes import frames
from mcore_rl.processes.child import start_module
from mcore_rl.rollout.tools.interface import ToolAnswer, ToolError
from mcore_rl.rollout.tools.schemas import Schema
from mcore_rl.rollout.tools.settings import ToolSettings
from mcore_rl.rollout.tools.tool_server import (
    ANSWER,
    BEAT_SECONDS,
    CALL,
    CANCEL,
    CLOSE,
    CLOSE_SECONDS,
    CLOSED,
    READY,
    REFUSED,
    SHUTDOWN,
    STUCK,
)

SILENT_SECONDS = 10.0
"""Time beyond the longest time limit of a tool after which a process that sends no beat counts as hanging."""


@dataclass
class ClosedEpisode:
    """Result of closing an episode: rewards by tool, and the errors of tools that could not close it."""

    rewards: dict[str, float] = field(default_factory=dict)
    error: str | None = None


class ToolProcess:
    """A process that runs the tools of `settings`.

    Construct it in the thread of the running event loop, which must outlive it (child.Child).

    ready: the schemas of the tools. Raises: ConfigError, WorkerDiedError.
    lost: set when the process has died, hangs or is shut down.
    """

    def __init__(self, settings: ToolSettings, start_seconds: float) -> None:
        self._child, self._socket = start_module("mcore_rl.rollout.tools.tool_server")
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._keys = 0
        self._last_message = time.monotonic()
        self._max_silence = start_seconds
        self._writer: asyncio.StreamWriter | None = None
        self.ready: asyncio.Future[list[Schema]] = asyncio.get_running_loop().create_future()
        self.lost = asyncio.Event()
        self.cause = ""
        self._tasks = [asyncio.create_task(self._receive(settings)), asyncio.create_task(self._watch())]

    @property
    def pid(self) -> int:
        return self._child.pid

    async def call(self, episode: str, name: str, arguments: dict[str, Any], kwargs: dict[str, Any]) -> ToolAnswer:
        """Call a tool.

        Raises: ToolError when the process is lost before it answers.
        """
        answer: ToolAnswer = await self._request(CALL, episode, name, arguments, kwargs)
        return answer

    async def close_episode(self, episode: str) -> ClosedEpisode:
        """Cancel the running calls of an episode and close it in every tool.

        Raises: ToolError when the process is lost before it answers.
        """
        closed: ClosedEpisode = await self._request(CLOSE, episode)
        return closed

    async def shutdown(self) -> None:
        """Let the tools release their resources for up to CLOSE_SECONDS, then kill the process tree."""
        if self._writer is not None and not self.lost.is_set():
            self._child.note_descendants()  # the process may end before it is killed
            frames.write(self._writer, SHUTDOWN)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.lost.wait(), CLOSE_SECONDS)
        self._lose("the tools are shut down")
        await asyncio.wait(self._tasks)

    async def _request(self, kind: str, *rest: Any) -> Any:
        if self.lost.is_set() or self._writer is None:
            raise ToolError(self.cause or "the tool process is not ready")
        self._keys += 1
        key, answer = self._keys, asyncio.get_running_loop().create_future()
        frames.write(self._writer, (kind, key, *rest))
        self._pending[key] = answer
        try:
            return await answer
        except asyncio.CancelledError:
            if not self.lost.is_set() and kind == CALL:
                frames.write(self._writer, (CANCEL, key))
            raise
        finally:
            self._pending.pop(key, None)

    async def _receive(self, settings: ToolSettings) -> None:
        """Handle messages until the process ends."""
        try:
            reader, self._writer = await asyncio.open_connection(sock=self._socket)
            frames.write(self._writer, settings)
            while True:
                self._handle(await frames.read(reader))
        except (EOFError, ConnectionError):
            self._lose("")
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._lose(f"its message cannot be read: {error!r}")
            raise

    def _handle(self, message: Any) -> None:
        self._last_message = time.monotonic()
        match message:
            case (str(kind), list(schemas), float() | int() as slowest) if kind == READY:
                self._max_silence = slowest + SILENT_SECONDS
                self.ready.set_result(schemas)
            case (str(kind), str(cause)) if kind == REFUSED:
                self._lose(cause, ConfigError(cause))
            case (str(kind), int(key), ToolAnswer() as answer) if kind == ANSWER:
                self._resolve(key, answer)
            case (str(kind), int(key), dict(rewards), error) if kind == CLOSED:
                self._resolve(key, ClosedEpisode(rewards, error))
            case (str(kind), str(cause)) if kind == STUCK:
                self._lose(cause)

    def _resolve(self, key: int, result: Any) -> None:
        if key in self._pending and not self._pending[key].done():
            self._pending[key].set_result(result)

    async def _watch(self) -> None:
        while not self.lost.is_set():
            if (silent := time.monotonic() - self._last_message) > self._max_silence:
                self._lose(f"it has not answered for {silent:.0f} seconds")
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.lost.wait(), min(BEAT_SECONDS, self._max_silence / 4))

    def _lose(self, cause: str, refusal: McoreRLError | None = None) -> None:
        if self.lost.is_set():
            return
        code = self._child.kill()
        self.cause = f"the tool process was lost: {cause or f'it ended with exit code {code}'}"
        self.lost.set()
        if self._writer is not None:
            self._writer.close()
        else:
            self._socket.close()
        if not self.ready.done():
            self.ready.set_exception(refusal or WorkerDiedError(self.cause))
            self.ready.exception()  # asyncio warns about errors that nobody has read
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(ToolError(self.cause))
        self._tasks[0].cancel()
