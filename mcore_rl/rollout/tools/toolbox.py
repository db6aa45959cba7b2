"""The tools of a run as an engine's process calls them: in other processes, so that none holds up the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.errors import McoreRLError, WorkerDiedError
from mcore_rl.rollout.tools.interface import ToolAnswer, ToolError
from mcore_rl.rollout.tools.limits import failure
from mcore_rl.rollout.tools.schemas import Schema
from mcore_rl.rollout.tools.settings import ToolSettings
from mcore_rl.rollout.tools.tool_process import ClosedEpisode, ToolProcess

START_SECONDS = 300.0
MAX_FAILED_STARTS = 3
RESTARTED = "Note: the tools were started anew; what earlier calls had left in them is gone.\n"


class ToolBox:
    """`await ToolBox.start(config)`, and then everything from the same asyncio loop, whose thread must outlive it.

    An episode belongs to one process, where its tools keep their state. A process that dies or hangs is replaced: calls
    under way in it are answered with an error, and its episodes begin anew in another and are told with their next
    answer.
    """

    schemas: list[Schema]
    """Of every tool, for the chat template."""

    def __init__(self, rollout: RolloutConfig, sandbox: SandboxConfig) -> None:
        self._settings = ToolSettings.of(rollout, sandbox)
        self._processes = [ToolProcess(self._settings, START_SECONDS) for _ in range(rollout.tool_processes)]
        self._homes: dict[str, ToolProcess] = {}
        self._forgetful: set[str] = set()
        """Episodes whose state was lost, until they have been told."""
        self._keepers: list[asyncio.Task[None]] = []
        self._failure: WorkerDiedError | None = None
        self.schemas = []
        self.restarts = 0

    @classmethod
    async def start(cls, rollout: RolloutConfig, sandbox: SandboxConfig | None = None) -> ToolBox:
        """Starts the processes and waits until they have loaded every tool.

        Raises: ConfigError for what rollout.tools names and cannot be used; WorkerDiedError.
        """
        box = cls(rollout, sandbox or SandboxConfig())
        try:
            box.schemas = (await asyncio.gather(*(process.ready for process in box._processes)))[0]
        except BaseException:
            await box.shutdown()
            raise
        box._settings = replace(box._settings, schemas=tuple(box.schemas))
        box._keepers = [asyncio.create_task(box._keep(i)) for i in range(rollout.tool_processes)]
        return box

    async def call(
        self, episode_id: str, name: str, arguments: dict[str, Any], tools_kwargs: Mapping[str, Any] | None = None
    ) -> ToolAnswer:
        """Calls a tool; several calls may run at once. Whatever goes wrong with it is in the answer. `tools_kwargs`:
        extra_info.tools_kwargs of the row, looked at with the first call of an episode.

        Raises: WorkerDiedError when tool processes cannot be started any more.
        """
        began = time.monotonic()
        if self._failure is not None:
            raise self._failure
        note = ""
        try:
            process = await self._home(episode_id)
            if episode_id in self._forgetful:
                self._forgetful.discard(episode_id)
                note = RESTARTED
            answer = await process.call(episode_id, name, arguments, dict(tools_kwargs or {}))
        except ToolError as error:
            outcome = failure(str(error))
            answer = ToolAnswer(outcome.text, error=outcome.error)
        return replace(answer, text=note + answer.text, seconds=time.monotonic() - began)

    async def close_episode(self, episode_id: str) -> ClosedEpisode:
        """Ends what runs of an episode and releases what its tools hold; to be called once for each that called one.
        Of tools with `lifecycle: episode` the result has the rewards."""
        process = self._homes.pop(episode_id, None)
        self._forgetful.discard(episode_id)
        if process is None:
            return ClosedEpisode()
        try:
            return await process.close_episode(episode_id)
        except ToolError as error:
            return ClosedEpisode(error=str(error))

    async def shutdown(self) -> None:
        """Ends every process. May be called again."""
        for keeper in self._keepers:
            keeper.cancel()
        if self._keepers:
            await asyncio.wait(self._keepers)
        await asyncio.gather(*(process.shutdown() for process in self._processes))

    async def _home(self, episode_id: str) -> ToolProcess:
        process = self._homes.get(episode_id)
        if process is not None and process.lost.is_set():
            self._forgetful.add(episode_id)
            process = None
        if process is None:
            homes = list(self._homes.values())
            process = min(self._processes, key=lambda each: (each.lost.is_set(), homes.count(each)))
            self._homes[episode_id] = process
        try:
            await asyncio.shield(process.ready)
        except McoreRLError as error:  # a file of tools that has changed since the run began is refused
            raise ToolError(str(error)) from error
        return process

    async def _keep(self, place: int) -> None:
        """Replaces the process at `place` whenever it is lost."""
        failed = 0
        while True:
            process = self._processes[place]
            await process.lost.wait()
            failed = 0 if _was_ready(process) else failed + 1
            if failed >= MAX_FAILED_STARTS:
                self._failure = WorkerDiedError(f"rollout.tools: {process.cause}, {failed} times before it was ready")
                return
            self.restarts += 1
            self._processes[place] = ToolProcess(self._settings, START_SECONDS)


def _was_ready(process: ToolProcess) -> bool:
    return process.ready.done() and not process.ready.cancelled() and process.ready.exception() is None
