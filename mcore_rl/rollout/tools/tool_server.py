"""Child process that runs tools (`python -m mcore_rl.rollout.tools.tool_server`), started by tool_process.

Messages in: ToolSettings first; then (CALL, key, episode, name, arguments, tools_kwargs), (CANCEL, key), (CLOSE, key,
episode), and SHUTDOWN. Messages out: (READY, schemas, longest time limit) or (REFUSED, cause); then (ANSWER, key,
ToolAnswer), (CLOSED, key, rewards, error), (STUCK, cause), and BEAT every second while the event loop runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import Any

from mcore_rl.config.functions import describe
from mcore_rl.errors import ConfigError
from mcore_rl.processes import frames
from mcore_rl.processes.served import parent_socket
from mcore_rl.rollout.tools.interface import EpisodeState, ToolAnswer
from mcore_rl.rollout.tools.limits import CANCELLED_ITSELF, LimitedTool, contained, failure
from mcore_rl.rollout.tools.load import load_tools
from mcore_rl.rollout.tools.settings import ToolSettings

READY, REFUSED, ANSWER, CLOSED, STUCK, BEAT = "ready", "refused", "answer", "closed", "stuck", "beat"
CALL, CANCEL, CLOSE, SHUTDOWN = "call", "cancel", "close", "shutdown"
BEAT_SECONDS = 1.0
"""Interval of BEAT messages. The parent kills a process that is silent for longer than its slowest call allows."""
CLOSE_SECONDS = 5.0
"""Time limit for releasing a tool's resources and for ending cancelled calls."""


def main() -> None:
    connection = parent_socket()
    with contextlib.suppress(EOFError, ConnectionError):  # the parent has closed the connection
        asyncio.run(serve(connection))
    os._exit(0)  # an ordinary exit would wait for threads of functions that do not return


async def serve(connection: socket.socket) -> None:
    """Load the tools and answer calls until SHUTDOWN.

    Raises: EOFError, ConnectionError when the parent closes the connection.
    """
    reader, writer = await asyncio.open_connection(sock=connection)
    settings: ToolSettings = await frames.read(reader)
    try:
        tools = await load_tools(settings, lambda cause: frames.write(writer, (STUCK, cause)))
    except ConfigError as error:
        frames.write(writer, (REFUSED, str(error)))
        await writer.drain()
        return
    slowest = max(tool.limits.timeout_seconds for tool in tools.values())
    frames.write(writer, (READY, [tool.schema for tool in tools.values()], slowest))
    beating = asyncio.create_task(_beat(writer))
    try:
        await ToolServer(tools, settings, writer).run(reader)
    finally:
        beating.cancel()


async def _beat(writer: asyncio.StreamWriter) -> None:
    while True:
        frames.write(writer, BEAT)
        await asyncio.sleep(BEAT_SECONDS)


class ToolServer:
    """Runs the parent's calls, as many at a time as the tools' limits allow."""

    def __init__(self, tools: dict[str, LimitedTool], settings: ToolSettings, writer: asyncio.StreamWriter) -> None:
        self._tools, self._settings, self._writer = tools, settings, writer
        self._episodes: dict[str, EpisodeState] = {}
        self._calls: dict[int, tuple[str, asyncio.Task[None]]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def run(self, reader: asyncio.StreamReader) -> None:
        while (message := await frames.read(reader)) != SHUTDOWN:
            match message:
                case (str(kind), int(key), *rest) if kind == CALL:
                    self._calls[key] = (rest[0], asyncio.create_task(self._call(key, *rest)))
                case (str(kind), int(key)) if kind == CANCEL:
                    self._cancel(key)
                case (str(kind), int(key), str(episode)) if kind == CLOSE:
                    task = asyncio.create_task(self._answer_close(key, episode))
                    self._closing.add(task)
                    task.add_done_callback(self._closing.discard)
        await asyncio.gather(*(self._close(episode) for episode in list(self._episodes)))
        for tool in self._tools.values():
            with contextlib.suppress(Exception):  # user code; the process ends in any case
                await asyncio.wait_for(tool.tool.close(), CLOSE_SECONDS)

    async def _call(
        self, key: int, episode_id: str, name: str, arguments: dict[str, Any], tools_kwargs: dict[str, Any]
    ) -> None:
        try:
            episode = self._episodes.setdefault(episode_id, EpisodeState.begin(episode_id, tools_kwargs))
            tool = self._tools.get(name)
            if tool is None:
                outcome = failure(f"there is no tool {name}; the tools are: {', '.join(self._tools)}")
            else:
                outcome = await tool.call(episode, arguments)
            text = self._settings.shortened(outcome)
            self._send((ANSWER, key, ToolAnswer(text, outcome.reward, outcome.metrics, outcome.error)))
        except asyncio.CancelledError:  # if the caller cancelled it, the caller ignores this answer
            outcome = failure("the episode was closed before the tool answered")
            self._send((ANSWER, key, ToolAnswer(outcome.text, error=outcome.error)))
            raise
        finally:
            self._calls.pop(key, None)

    def _send(self, message: Any) -> None:
        try:
            frames.write(self._writer, message)
        except Exception as error:  # pickle rejects a value in the metrics of a user's tool
            kind, key, answer = message
            reason = f"the tool's metrics cannot be sent: {describe(error)}"
            frames.write(self._writer, (kind, key, ToolAnswer(answer.text, answer.reward, error=reason)))

    def _cancel(self, key: int) -> None:
        if key in self._calls:
            self._calls[key][1].cancel()

    async def _answer_close(self, key: int, episode_id: str) -> None:
        rewards, errors = await self._close(episode_id)
        frames.write(self._writer, (CLOSED, key, rewards, "; ".join(errors) or None))

    async def _close(self, episode_id: str) -> tuple[dict[str, float], list[str]]:
        """Cancel the running calls of an episode, then close it in every tool; return rewards and errors."""
        running = [task for episode, task in self._calls.values() if episode == episode_id]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=CLOSE_SECONDS)
        episode = self._episodes.pop(episode_id, None)
        rewards: dict[str, float] = {}
        errors: list[str] = []
        if episode is None:
            return rewards, errors
        for name, tool in self._tools.items():
            closing = asyncio.create_task(contained(tool.tool.close_episode(episode)))
            done, _ = await asyncio.wait({closing}, timeout=tool.limits.timeout_seconds)
            if not done:
                closing.cancel()
            # An error of a user's tool must not keep the other tools from closing.
            error = TimeoutError() if not done else None if closing.cancelled() else closing.exception()
            if error is not None or closing.cancelled():
                errors.append(f"{name}: {describe(error) if error is not None else CANCELLED_ITSELF}")
            elif (reward := closing.result()) is not None:
                rewards[name] = reward
        return rewards, errors


if __name__ == "__main__":
    main()
