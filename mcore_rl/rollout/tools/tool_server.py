"""Child process that runs tools (`python -m mcore_rl.rollout.tools.tool_server`), started by toolbox.ToolProcess.

Messages in: ToolSettings first; then ("call", key, episode, name, arguments, tools_kwargs), ("cancel", key), ("close",
key, episode), and "shutdown". Messages out: ("ready", schemas, longest time limit) or ("refused", cause); then
("answer", key, ToolResult or ClosedEpisode), ("stuck", cause), and "beat" every second while the event loop runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import replace

from mcore_rl.config.functions import describe
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.errors import ConfigError
from mcore_rl.processes import frames
from mcore_rl.processes.served import parent_socket
from mcore_rl.rollout.tools.images import check_images
from mcore_rl.rollout.tools.interface import ClosedEpisode, EpisodeState, ToolResult
from mcore_rl.rollout.tools.limits import CANCELLED_ITSELF, LimitedTool, contained, failure
from mcore_rl.rollout.tools.load import ToolSettings, load_tools

BEAT_SECONDS = 1.0
"""Interval of beats. The parent kills a process that is silent for longer than its slowest call allows."""
CLOSE_SECONDS = 5.0
"""Time limit for releasing a tool's resources and for ending cancelled calls."""
OMITTED = "\n... ({} characters left out) ...\n"
IMAGES_OMITTED = "\n({} images left out)"


def main() -> None:
    connection = parent_socket()
    with contextlib.suppress(EOFError, ConnectionError):  # the parent has closed the connection
        asyncio.run(serve(connection))
    os._exit(0)  # an ordinary exit would wait for threads of functions that do not return


async def serve(connection: socket.socket) -> None:
    """Load the tools and answer calls until "shutdown".

    Raises: EOFError, ConnectionError when the parent closes the connection.
    """
    reader, writer = await asyncio.open_connection(sock=connection)
    settings: ToolSettings = await frames.read(reader)
    try:
        tools = await load_tools(settings, lambda cause: frames.write(writer, ("stuck", cause)))
    except ConfigError as error:
        frames.write(writer, ("refused", str(error)))
        await writer.drain()
        return
    slowest = max(tool.limits.timeout_seconds for tool in tools.values())
    frames.write(writer, ("ready", [tool.tool.schema for tool in tools.values()], slowest))
    beating = asyncio.create_task(_beat(writer))
    try:
        await ToolServer(tools, settings.rollout, writer).run(reader)
    finally:
        beating.cancel()


async def _beat(writer: asyncio.StreamWriter) -> None:
    # A blocked event loop sends no beat, by which the parent detects it.
    while True:
        frames.write(writer, "beat")
        await asyncio.sleep(BEAT_SECONDS)


class ToolServer:
    """Runs the parent's calls, as many at a time as the tools' limits allow."""

    def __init__(self, tools: dict[str, LimitedTool], rollout: RolloutConfig, writer: asyncio.StreamWriter) -> None:
        self._tools, self._rollout, self._writer = tools, rollout, writer
        self._episodes: dict[str, EpisodeState] = {}
        self._calls: dict[int, tuple[str, asyncio.Task[None]]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def run(self, reader: asyncio.StreamReader) -> None:
        while (message := await frames.read(reader)) != "shutdown":
            match message:
                case ("call", key, episode, *call):
                    self._calls[key] = (episode, asyncio.create_task(self._call(key, episode, *call)))
                case ("cancel", key):
                    if key in self._calls:
                        self._calls[key][1].cancel()
                case ("close", key, episode):
                    task = asyncio.create_task(self._answer_close(key, episode))
                    self._closing.add(task)
                    task.add_done_callback(self._closing.discard)
        # Users' tools may hold resources that do not end with this process.
        await asyncio.gather(*(self._close(episode) for episode in list(self._episodes)))
        for tool in self._tools.values():
            with contextlib.suppress(Exception):  # user code; the process ends in any case
                await asyncio.wait_for(tool.tool.close(), CLOSE_SECONDS)

    async def _call(
        self, key: int, episode_id: str, name: str, arguments: dict[str, object], tools_kwargs: Mapping[str, object]
    ) -> None:
        try:
            episode = self._episodes.setdefault(episode_id, EpisodeState(episode_id, tools_kwargs))
            tool = self._tools.get(name)
            if tool is None:
                result = failure(f"there is no tool {name}; the tools are: {', '.join(self._tools)}")
            else:
                result = await tool.call(episode, arguments)
            answer = await self._within_limits(result)
            try:
                frames.write(self._writer, ("answer", key, answer))
            except Exception as error:  # pickle rejects a value in the metrics of a user's tool
                reason = f"the tool's metrics cannot be sent: {describe(error)}"
                frames.write(self._writer, ("answer", key, replace(answer, metrics={}, error=reason)))
        except asyncio.CancelledError:  # if the caller cancelled it, the caller ignores this answer
            frames.write(self._writer, ("answer", key, failure("the episode was closed before the tool answered")))
            raise
        except Exception as error:  # a user's class may return any object
            frames.write(self._writer, ("answer", key, failure(f"the tool's result is invalid: {describe(error)}")))
        finally:
            self._calls.pop(key, None)

    async def _within_limits(self, result: ToolResult) -> ToolResult:
        """Return the result with a shorter text and fewer images, or an error if an image is too large or damaged."""
        # A user's tool may return another class, which the parent process cannot load, with or without images.
        answer = ToolResult(_shortened(result.text, self._rollout), result.reward, result.metrics, result.error)
        given, most = tuple(getattr(result, "images", ())), self._rollout.tool_answer_images
        try:
            if images := given[:most]:
                await asyncio.to_thread(check_images, images)
        except (TypeError, ValueError) as error:
            return answer.rejected(str(error))
        omitted = IMAGES_OMITTED.format(len(given) - most) if len(given) > most else ""
        return replace(answer, text=answer.text + omitted, images=images)

    async def _answer_close(self, key: int, episode_id: str) -> None:
        frames.write(self._writer, ("answer", key, await self._close(episode_id)))

    async def _close(self, episode_id: str) -> ClosedEpisode:
        """Cancel the running calls of an episode, then close it in every tool."""
        running = [task for episode, task in self._calls.values() if episode == episode_id]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=CLOSE_SECONDS)
        rewards: dict[str, float] = {}
        errors: list[str] = []
        if (episode := self._episodes.pop(episode_id, None)) is None:
            return ClosedEpisode()
        for name, tool in self._tools.items():
            closing = asyncio.create_task(contained(tool.tool.close_episode(episode)))
            done, _ = await asyncio.wait({closing}, timeout=tool.limits.timeout_seconds)
            # An error of a user's tool must not keep the other tools from closing.
            if not done:
                closing.cancel()
                errors.append(f"{name}: {describe(TimeoutError())}")
            elif closing.cancelled():
                errors.append(f"{name}: {CANCELLED_ITSELF}")
            elif (error := closing.exception()) is not None:
                errors.append(f"{name}: {describe(error)}")
            elif (reward := closing.result()) is not None:
                rewards[name] = reward
        return ClosedEpisode(rewards, "; ".join(errors) or None)


def _shortened(text: str, rollout: RolloutConfig) -> str:
    """Return the text for the model: valid UTF-8, with at most rollout.tool_answer_characters characters plus a mark
    for the omitted part."""
    # A lone surrogate in a tool's result could neither be tokenized nor written to the records.
    text = text.encode("utf-8", "replace").decode("utf-8")
    limit = rollout.tool_answer_characters
    if len(text) <= limit:
        return text
    mark = OMITTED.format(len(text) - limit)
    if rollout.tool_answer_keep == "start":
        return text[:limit] + mark.rstrip("\n")
    if rollout.tool_answer_keep == "end":
        return mark.lstrip("\n") + text[-limit:]
    first = (limit + 1) // 2
    return text[:first] + mark + text[len(text) - (limit - first) :]


if __name__ == "__main__":
    main()
