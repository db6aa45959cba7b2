"""One process of tools as the engine's process sees it: started, fed, watched, ended with all its children."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import psutil

from mcore_rl.errors import ConfigError, McoreRLError, WorkerDiedError
from mcore_rl.processes.tree import descendants_of, kill_tree, marked, new_mark
from mcore_rl.rollout.tools import frames
from mcore_rl.rollout.tools.interface import ToolAnswer, ToolError
from mcore_rl.rollout.tools.process import (
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
from mcore_rl.rollout.tools.schemas import Schema
from mcore_rl.rollout.tools.settings import ToolSettings

SILENT_SECONDS = 10.0
"""Beyond the longest time limit of a tool: a process whose loop has not turned for so long hangs."""


@dataclass
class ClosedEpisode:
    """What the tools had to say when an episode was closed: rewards by tool, and what went wrong."""

    rewards: dict[str, float] = field(default_factory=dict)
    error: str | None = None


class ToolProcess:
    """Construct it in the thread of the running loop, which must outlive it: Linux kills the process when that thread
    ends. `ready` gives the schemas, or raises ConfigError or WorkerDiedError; `lost` is set once it is of no use.
    """

    def __init__(self, settings: ToolSettings, start_seconds: float) -> None:
        self._ours, theirs = socket.socketpair()
        self._mark = new_mark()
        self._descendants: list[psutil.Process] = []
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "mcore_rl.rollout.tools.process", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=marked({**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _path()}, self._mark),
                process_group=0,
            )
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._keys = 0
        self._heard = time.monotonic()
        self._patience = start_seconds
        self._writer: asyncio.StreamWriter | None = None
        self.ready: asyncio.Future[list[Schema]] = asyncio.get_running_loop().create_future()
        self.lost = asyncio.Event()
        self.cause = ""
        self._tasks = [asyncio.create_task(self._run(settings)), asyncio.create_task(self._watch())]

    @property
    def pid(self) -> int:
        return self._process.pid

    async def call(self, episode: str, name: str, arguments: dict[str, Any], kwargs: dict[str, Any]) -> ToolAnswer:
        """Raises: ToolError when the process is lost before it answers."""
        answer: ToolAnswer = await self._asked(CALL, episode, name, arguments, kwargs)
        return answer

    async def close_episode(self, episode: str) -> ClosedEpisode:
        """Raises: ToolError when the process is lost before it answers."""
        closed: ClosedEpisode = await self._asked(CLOSE, episode)
        return closed

    async def shutdown(self) -> None:
        """Lets tools release what they hold, for a moment, and ends the process and all that it started."""
        if self._writer is not None and not self.lost.is_set():
            self._descendants = descendants_of(self.pid)  # the process may end before it is killed
            frames.write(self._writer, SHUTDOWN)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.lost.wait(), CLOSE_SECONDS)
        self._lose("the tools are shut down")
        await asyncio.wait(self._tasks)

    async def _asked(self, kind: str, *rest: Any) -> Any:
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

    async def _run(self, settings: ToolSettings) -> None:
        """Takes messages until the process is gone."""
        try:
            reader, self._writer = await asyncio.open_connection(sock=self._ours)
            frames.write(self._writer, settings)
            while True:
                self._take(await frames.read(reader))
        except (EOFError, ConnectionError):
            self._lose("")
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._lose(f"what it sent cannot be read: {error!r}")
            raise

    def _take(self, message: Any) -> None:
        self._heard = time.monotonic()
        match message:
            case (str(kind), list(schemas), float() | int() as slowest) if kind == READY:
                self._patience = slowest + SILENT_SECONDS
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
            if (silent := time.monotonic() - self._heard) > self._patience:
                self._lose(f"it has not answered for {silent:.0f} seconds")
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.lost.wait(), min(BEAT_SECONDS, self._patience / 4))

    def _lose(self, cause: str, refusal: McoreRLError | None = None) -> None:
        if self.lost.is_set():
            return
        code = kill_tree(self._process, self._mark, self._descendants)
        self.cause = f"the tool process was lost: {cause or f'it ended with exit code {code}'}"
        self.lost.set()
        if self._writer is not None:
            self._writer.close()
        else:
            self._ours.close()
        if not self.ready.done():
            self.ready.set_exception(refusal or WorkerDiedError(self.cause))
            self.ready.exception()  # nobody may be waiting
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(ToolError(self.cause))
        self._tasks[0].cancel()


def _path() -> str:
    return os.pathsep.join(entry or os.getcwd() for entry in sys.path)
