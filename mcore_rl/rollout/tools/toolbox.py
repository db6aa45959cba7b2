"""Tools of a run, as called by an engine's process. They run in other processes, so that no tool blocks the engine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Mapping
from dataclasses import replace

from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.errors import ConfigError, McoreRLError, WorkerDiedError
from mcore_rl.processes import frames
from mcore_rl.processes.child import start_module
from mcore_rl.rollout.tools.interface import ClosedEpisode, ToolError, ToolResult
from mcore_rl.rollout.tools.limits import failure
from mcore_rl.rollout.tools.load import ToolSettings
from mcore_rl.rollout.tools.schemas import Schema, name_of
from mcore_rl.rollout.tools.tool_server import BEAT_SECONDS, CLOSE_SECONDS

START_SECONDS = 300.0
"""Time limit until a process has loaded all tools."""
SILENT_SECONDS = 10.0
"""Time beyond the longest time limit of a tool after which a process that sends no beat counts as hanging."""
MAX_FAILED_STARTS = 3
"""Failed starts in a row of a process after which the run ends."""
RESTARTED = "Note: the tools were restarted; the state of earlier calls is lost.\n"


class ToolProcess:
    """Parent side of a process that runs the tools of `settings` (tool_server).

    Construct it in the thread of the running event loop, which must outlive it (child.Child).

    ready: the schemas of the tools. Raises: ConfigError, WorkerDiedError.
    lost: set when the process has died, hangs or is shut down.
    """

    def __init__(self, settings: ToolSettings) -> None:
        self._child, self._socket = start_module("mcore_rl.rollout.tools.tool_server")
        self.pid = self._child.pid
        self._pending: dict[int, asyncio.Future[ToolResult | ClosedEpisode]] = {}
        self._keys = itertools.count()
        self._last_message = time.monotonic()
        self._max_silence = START_SECONDS
        self._writer: asyncio.StreamWriter | None = None
        self.ready: asyncio.Future[list[Schema]] = asyncio.get_running_loop().create_future()
        self.lost = asyncio.Event()
        self.cause = ""
        self._tasks = [asyncio.create_task(self._receive(settings)), asyncio.create_task(self._watch())]

    async def request(self, kind: str, *arguments: object) -> ToolResult | ClosedEpisode:
        """Send a "call" or "close" request (see tool_server) and return its answer.

        Raises: ToolError when the process is lost before it answers.
        """
        if self.lost.is_set() or self._writer is None:
            raise ToolError(self.cause or "the tool process is not ready")
        key, answer = next(self._keys), asyncio.get_running_loop().create_future()
        frames.write(self._writer, (kind, key, *arguments))
        self._pending[key] = answer
        try:
            return await answer
        except asyncio.CancelledError:
            if not self.lost.is_set() and kind == "call":
                frames.write(self._writer, ("cancel", key))
            raise
        finally:
            self._pending.pop(key, None)

    async def shutdown(self) -> None:
        """Let the tools release their resources for up to CLOSE_SECONDS, then kill the process tree."""
        if self._writer is not None and not self.lost.is_set():
            self._child.note_descendants()  # the process may end before it is killed
            frames.write(self._writer, "shutdown")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.lost.wait(), CLOSE_SECONDS)
        self._lose("the tools are shut down")
        await asyncio.wait(self._tasks)

    async def _receive(self, settings: ToolSettings) -> None:
        """Handle messages until the process ends."""
        try:
            reader, self._writer = await asyncio.open_connection(sock=self._socket)
            frames.write(self._writer, settings)
            while True:
                message = await frames.read(reader)
                self._last_message = time.monotonic()
                match message:
                    case ("ready", schemas, slowest):
                        self._max_silence = slowest + SILENT_SECONDS
                        self.ready.set_result(schemas)
                    case ("refused", cause):
                        self._lose(cause, ConfigError(cause))
                    case ("answer", key, answer):
                        if key in self._pending and not self._pending[key].done():
                            self._pending[key].set_result(answer)
                    case ("stuck", cause):
                        self._lose(cause)
        except (EOFError, ConnectionError):
            self._lose("")
        except Exception as error:
            self._lose(f"its message cannot be read: {error!r}")
            raise

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
            # The connection had not been opened, so no writer owns the socket.
            self._socket.close()
        if not self.ready.done():
            self.ready.set_exception(refusal or WorkerDiedError(self.cause))
            self.ready.exception()  # asyncio warns about errors that nobody has read
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(ToolError(self.cause))
        self._tasks[0].cancel()


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
        self._settings = ToolSettings(rollout, sandbox)
        self._processes = [ToolProcess(self._settings) for _ in range(rollout.tool_processes)]
        self._process_of: dict[str, ToolProcess] = {}
        self._lost_state: set[str] = set()
        """Episodes whose state was lost and that have not been notified yet."""
        self._monitors: list[asyncio.Task[None]] = []
        self._failure: WorkerDiedError | None = None
        self.schemas = []

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
        box._settings = replace(box._settings, schemas={name_of(schema): schema for schema in box.schemas})
        box._monitors = [asyncio.create_task(box._replace_lost(i)) for i in range(rollout.tool_processes)]
        return box

    async def call(
        self, episode_id: str, name: str, arguments: dict[str, object], tools_kwargs: Mapping[str, object] | None = None
    ) -> ToolResult:
        """Call a tool; calls may run concurrently. All errors of the call are in the result. `tools_kwargs`:
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
            result = await process.request("call", episode_id, name, arguments, dict(tools_kwargs or {}))
            assert isinstance(result, ToolResult)
        except ToolError as error:
            result = failure(str(error))
        return replace(result, text=note + result.text, seconds=time.monotonic() - began)

    async def close_episode(self, episode_id: str) -> ClosedEpisode:
        """End an episode's running calls and release its resources. Call it once for each episode that called a tool.
        The result contains the rewards of tools with `lifecycle: episode`."""
        process = self._process_of.pop(episode_id, None)
        self._lost_state.discard(episode_id)
        if process is None:
            return ClosedEpisode()
        try:
            closed = await process.request("close", episode_id)
            assert isinstance(closed, ClosedEpisode)
            return closed
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
            ready = process.ready
            failed = 0 if ready.done() and not ready.cancelled() and ready.exception() is None else failed + 1
            if failed >= MAX_FAILED_STARTS:
                self._failure = WorkerDiedError(f"rollout.tools: {process.cause}, {failed} times before it was ready")
                return
            self._processes[place] = ToolProcess(self._settings)


def check_tools(rollout: RolloutConfig, sandbox: SandboxConfig) -> list[Schema]:
    """Load every tool in a tool process, as the run does, and return their schemas; empty if rollout.tools is null.

    Raises: ConfigError naming rollout.tools, its file and key, and the cause.
    """

    async def load() -> list[Schema]:
        box = await ToolBox.start(replace(rollout, tool_processes=1), sandbox)
        await box.shutdown()
        return box.schemas

    return [] if rollout.tools is None else asyncio.run(load())
