"""Tools of a run, as called by an engine's process. They run in other processes, so that no tool blocks the engine."""

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
"""Time limit until a process has loaded all tools."""
MAX_FAILED_STARTS = 3
"""Failed starts in a row of a process after which the run ends."""
RESTARTED = "Note: the tools were restarted; the state of earlier calls is lost.\n"


class ToolBox:
    """Tool processes of one engine. Create it with `await ToolBox.start(config)` and call everything from the same
    asyncio loop, whose thread must outlive it.

    An episode is assigned to one process, where its tools keep their state. A process that dies or hangs is replaced:
    its running calls are answered with an error, and its episodes continue in another process without their state,
    which their next answer reports.
    """

    schemas: list[Schema]
    """Schema of every tool, for the chat template."""

    def __init__(self, rollout: RolloutConfig, sandbox: SandboxConfig) -> None:
        self._settings = ToolSettings.of(rollout, sandbox)
        self._processes = [ToolProcess(self._settings, START_SECONDS) for _ in range(rollout.tool_processes)]
        self._process_of: dict[str, ToolProcess] = {}
        self._lost_state: set[str] = set()
        """Episodes whose state was lost and that have not been notified yet."""
        self._monitors: list[asyncio.Task[None]] = []
        self._failure: WorkerDiedError | None = None
        self.schemas = []
        self.restarts = 0

    @classmethod
    async def start(cls, rollout: RolloutConfig, sandbox: SandboxConfig | None = None) -> ToolBox:
        """Start the processes and wait until they have loaded every tool.

        Raises: ConfigError if a tool of rollout.tools cannot be used; WorkerDiedError.
        """
        box = cls(rollout, sandbox or SandboxConfig())
        try:
            box.schemas = (await asyncio.gather(*(process.ready for process in box._processes)))[0]
        except BaseException:
            await box.shutdown()
            raise
        box._settings = replace(box._settings, schemas=tuple(box.schemas))
        box._monitors = [asyncio.create_task(box._replace_lost(i)) for i in range(rollout.tool_processes)]
        return box

    async def call(
        self, episode_id: str, name: str, arguments: dict[str, Any], tools_kwargs: Mapping[str, Any] | None = None
    ) -> ToolAnswer:
        """Call a tool; calls may run concurrently. All errors of the call are in the answer. `tools_kwargs`:
        extra_info.tools_kwargs of the row; only the first call of an episode uses it.

        Raises: WorkerDiedError if tool processes cannot be started any more.
        """
        began = time.monotonic()
        if self._failure is not None:
            raise self._failure
        note = ""
        try:
            process = await self._assigned_process(episode_id)
            if episode_id in self._lost_state:
                self._lost_state.discard(episode_id)
                note = RESTARTED
            answer = await process.call(episode_id, name, arguments, dict(tools_kwargs or {}))
        except ToolError as error:
            outcome = failure(str(error))
            answer = ToolAnswer(outcome.text, error=outcome.error)
        return replace(answer, text=note + answer.text, seconds=time.monotonic() - began)

    async def close_episode(self, episode_id: str) -> ClosedEpisode:
        """End an episode's running calls and release its resources. Call it once for each episode that called a tool.
        The result contains the rewards of tools with `lifecycle: episode`."""
        process = self._process_of.pop(episode_id, None)
        self._lost_state.discard(episode_id)
        if process is None:
            return ClosedEpisode()
        try:
            return await process.close_episode(episode_id)
        except ToolError as error:
            return ClosedEpisode(error=str(error))

    async def shutdown(self) -> None:
        """Stop all processes. May be called again."""
        for monitor in self._monitors:
            monitor.cancel()
        if self._monitors:
            await asyncio.wait(self._monitors)
        await asyncio.gather(*(process.shutdown() for process in self._processes))

    async def _assigned_process(self, episode_id: str) -> ToolProcess:
        # An episode stays in its process, since tools may keep state there. If the process is lost, so is the state.
        process = self._process_of.get(episode_id)
        if process is not None and process.lost.is_set():
            self._lost_state.add(episode_id)
            process = None
        if process is None:
            assigned = list(self._process_of.values())
            # The process with the fewest episodes; lost processes only if there is no other.
            process = min(self._processes, key=lambda each: (each.lost.is_set(), assigned.count(each)))
            self._process_of[episode_id] = process
        try:
            await asyncio.shield(process.ready)
        except McoreRLError as error:  # for example a tool file that was changed since the start of the run
            raise ToolError(str(error)) from error
        return process

    async def _replace_lost(self, place: int) -> None:
        """Replace the process at `place` whenever it is lost."""
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
