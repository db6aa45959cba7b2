"""Built-in tools that run the model's code in the sandbox: an interpreter and a shell, one of each per episode."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.rollout.tools.interface import EpisodeState, Tool, ToolResult
from mcore_rl.rollout.tools.schemas import Schema
from mcore_rl.sandbox.interpreter import Interpreter, Shell
from mcore_rl.sandbox.local import LocalSandbox

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

    async def close(self) -> None: ...
