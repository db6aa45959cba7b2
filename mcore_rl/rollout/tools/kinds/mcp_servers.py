"""Tools of MCP servers, over standard input and output or HTTP: the only door to the `mcp` package.

A server runs once for a tool process, not for an episode: the protocol knows no state of one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_rl import parent_death
from mcore_rl.config.functions import describe
from mcore_rl.errors import ConfigError
from mcore_rl.rollout.tools.interface import Episode, Outcome, RetryableToolError, ToolError
from mcore_rl.rollout.tools.kinds.outcomes import as_text
from mcore_rl.rollout.tools.schemas import Schema, checked_schema

if TYPE_CHECKING:
    from mcp import ClientSession

CONNECT_SECONDS = 60.0
MAX_PAGES = 100
"""Of a server's list of tools."""


def read_servers(told: str, path: Path) -> dict[str, McpServer]:
    """The servers of a JSON file with `mcpServers`, by name: {"command", "args", "env", "cwd"} or {"url", "headers" or
    "auth_token"}.

    Raises: ConfigError.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{told} cannot be read: {describe(error)}") from error
    servers = content.get("mcpServers") if isinstance(content, dict) else None
    if not isinstance(servers, dict) or not servers:
        raise ConfigError(f'{told} must hold {{"mcpServers": {{NAME: {{"command": ...}} or {{"url": ...}}}}}}')
    for name, settings in servers.items():
        if not isinstance(settings, dict) or not ({"command", "url"} & settings.keys()):
            raise ConfigError(f"{told}: server {name} has neither command nor url; give one of them")
    return {name: McpServer(f"{told}: server {name}", settings) for name, settings in servers.items()}


class McpServer:
    """A connection to one server, made when it is first needed and again after it broke."""

    def __init__(self, told: str, settings: dict[str, Any]) -> None:
        self._told, self._settings = told, settings
        self._closing = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None
        self._connected: asyncio.Future[ClientSession] | None = None

    async def tools(self) -> list[McpTool]:
        """Raises: ConfigError where it cannot be reached or gives schemas that are none."""
        try:
            infos = await self._list()
        except Exception as error:  # of a server that is not ours
            raise ConfigError(f"{self._told} does not answer: {_cause(error)}") from error
        made = []
        for info in infos:
            function = {"name": info.name, "description": info.description or "", "parameters": info.input_schema}
            made.append(McpTool(self, checked_schema(self._told, {"type": "function", "function": function})))
        return made

    async def call(self, name: str, arguments: dict[str, Any]) -> Outcome:
        """Raises: ToolError with the server's own words; RetryableToolError where the connection broke."""
        from mcp.shared.exceptions import MCPError
        from mcp.types import CONNECTION_CLOSED

        try:
            session = await self._session()
            result = await session.call_tool(name, arguments)
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                raise ToolError(str(error)) from error
            await self.close()
            raise RetryableToolError("the MCP server closed the connection") from error
        except Exception as error:  # of the transport
            await self.close()
            raise RetryableToolError(f"the MCP server cannot be reached: {_cause(error)}") from error
        parts = [getattr(part, "text", None) or f"[{part.type}]" for part in result.content]
        text = "\n".join(parts) or as_text(result.structured_content or "")
        if result.is_error:
            raise ToolError(text)
        return Outcome(text)

    async def close(self) -> None:
        runner, self._runner = self._runner, None
        self._closing.set()
        if runner is not None:
            await asyncio.wait({runner})

    async def _list(self) -> Sequence[Any]:
        from mcp.types import PaginatedRequestParams

        session = await self._session()
        page = await session.list_tools()
        infos = list(page.tools)
        for _ in range(MAX_PAGES):
            if page.next_cursor is None:
                break
            page = await session.list_tools(params=PaginatedRequestParams(cursor=page.next_cursor))
            infos += page.tools
        return infos

    async def _session(self) -> ClientSession:
        if self._runner is None or self._runner.done():
            self._connected, self._closing = asyncio.get_running_loop().create_future(), asyncio.Event()
            self._runner = asyncio.create_task(self._run(self._connected, self._closing))
        assert self._connected is not None
        return await asyncio.wait_for(asyncio.shield(self._connected), CONNECT_SECONDS)

    async def _run(self, connected: asyncio.Future[ClientSession], closing: asyncio.Event) -> None:
        """Opens and closes the session in one task, as the package demands."""
        from mcp import ClientSession

        try:
            async with self._streams() as (read, write), ClientSession(read, write) as session:
                await session.initialize()
                connected.set_result(session)
                await closing.wait()
        except Exception as error:  # of the transport; what is under way has been told by the session
            if not connected.done():
                connected.set_exception(error)
                connected.exception()  # whoever waited may have given up

    @contextlib.asynccontextmanager
    async def _streams(self) -> AsyncIterator[tuple[Any, Any]]:
        from mcp import StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared._httpx_utils import create_mcp_http_client

        if (url := self._settings.get("url")) is not None:
            token = self._settings.get("auth_token")
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            headers |= self._settings.get("headers") or {}
            async with create_mcp_http_client(headers) as client, streamable_http_client(url, http_client=client) as s:
                yield s
            return
        command = [self._settings["command"], *self._settings.get("args", [])]
        parameters = StdioServerParameters(
            command=sys.executable,  # the package starts servers in sessions of their own, which outlive this process
            args=["-I", parent_death.__file__, str(os.getpid()), *command],
            env=self._settings.get("env"),
            cwd=self._settings.get("cwd"),
        )
        async with stdio_client(parameters) as streams:
            yield streams


class McpTool:
    """A tool of a server."""

    def __init__(self, server: McpServer, schema: Schema) -> None:
        self.schema = schema
        self._server = server

    async def call(self, episode: Episode, arguments: dict[str, Any]) -> Outcome:
        return await self._server.call(self.schema["function"]["name"], arguments)

    async def close_episode(self, episode: Episode) -> float | None:
        return None

    async def close(self) -> None:
        await self._server.close()


def _cause(error: BaseException) -> str:
    """Of a group of errors, in which task groups wrap what happened, the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return describe(error)
