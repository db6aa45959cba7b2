"""Tools of MCP servers, over standard input and output, HTTP or SSE. Only this module imports the `mcp` package.

Each tool process runs a server once, not per episode: the protocol has no state of an episode.
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
from mcore_rl.rollout.tools.interface import EpisodeState, RetryableToolError, ToolError, ToolResult
from mcore_rl.rollout.tools.kinds.mcp_settings import HTTP, SSE, STDIO, ServerSettings
from mcore_rl.rollout.tools.kinds.results import as_text
from mcore_rl.rollout.tools.schemas import Schema, checked_schema

if TYPE_CHECKING:
    import httpx2
    from mcp import ClientSession

CONNECT_SECONDS = 60.0
"""Time limit for opening a session; a server process may import large packages first."""
HTTP_SECONDS = 30.0
"""Timeout for connecting and for sending a request."""
HTTP_ERRORS = 400
"""Lowest status code of an error."""
SSE_IDLE_SECONDS = 86400.0
"""Timeout without an event; calls have their own limits."""
MAX_PAGES = 100
"""Maximum number of further pages of a server's list of tools: a faulty server may never send the last one."""


def read_servers(origin: str, path: Path) -> dict[str, McpServer]:
    """Read the servers of a JSON file with `mcpServers`, by name (see ServerSettings).

    Raises: ConfigError.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{origin} cannot be read: {describe(error)}") from error
    servers = content.get("mcpServers") if isinstance(content, dict) else None
    if not isinstance(servers, dict) or not servers:
        raise ConfigError(f'{origin} must hold {{"mcpServers": {{NAME: {{"command": ...}} or {{"url": ...}}}}}}')
    named = {name: (f"{origin}: server {name}", settings) for name, settings in servers.items()}
    return {name: McpServer(origin, ServerSettings.of(origin, settings)) for name, (origin, settings) in named.items()}


class McpServer:
    """Connection to a server, opened on first use and again after it breaks."""

    def __init__(self, origin: str, settings: ServerSettings) -> None:
        self._origin, self._settings = origin, settings
        self._status = ""
        """Status of the last failed HTTP response."""
        self._closing = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None
        self._connected: asyncio.Future[ClientSession] | None = None

    async def tools(self) -> list[McpTool]:
        """List the tools. Raises: ConfigError if the server cannot be reached or returns invalid schemas."""
        try:
            infos = await self._list()
        except Exception as error:  # any error of a third-party server
            raise ConfigError(f"{self._origin} does not answer: {self._cause(error)}") from error
        made = []
        for info in infos:
            function = {"name": info.name, "description": info.description or "", "parameters": info.input_schema}
            made.append(McpTool(self, checked_schema(self._origin, {"type": "function", "function": function})))
        return made

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Call a tool. Raises: ToolError with the server's message; RetryableToolError if the connection broke."""
        from mcp.shared.exceptions import MCPError
        from mcp.types import CONNECTION_CLOSED

        try:
            session = await self._session()
            result = await session.call_tool(name, arguments)
        except MCPError as error:
            # An error reported by the server is final; only a lost connection is worth a retry.
            if error.code != CONNECTION_CLOSED:
                raise ToolError(str(error)) from error
            await self.close()
            raise RetryableToolError("the MCP server closed the connection") from error
        except Exception as error:  # any error of the transport
            await self.close()
            raise RetryableToolError(f"the MCP server cannot be reached: {self._cause(error)}") from error
        parts = [getattr(part, "text", None) or f"[{part.type}]" for part in result.content]
        text = "\n".join(parts) or as_text(result.structured_content or "")
        if result.is_error:
            raise ToolError(text)
        return ToolResult(text)

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
        # Several calls wait for the same connection: the timeout of one must not cancel it for the others.
        return await asyncio.wait_for(asyncio.shield(self._connected), CONNECT_SECONDS)

    async def _run(self, connected: asyncio.Future[ClientSession], closing: asyncio.Event) -> None:
        """Open and close the session in the same task, as the package requires."""
        from mcp import ClientSession

        try:
            async with self._streams() as (read, write), ClientSession(read, write) as session:
                await session.initialize()
                connected.set_result(session)
                await closing.wait()
        except Exception as error:  # any error of the transport; the session has passed it to running calls
            if not connected.done():
                connected.set_exception(error)
                connected.exception()  # mark as retrieved, since the caller may have given up

    @contextlib.asynccontextmanager
    async def _streams(self) -> AsyncIterator[tuple[Any, Any]]:
        from mcp import StdioServerParameters, stdio_client
        from mcp.client.sse import sse_client
        from mcp.client.streamable_http import streamable_http_client

        settings = self._settings
        if settings.transport == SSE:
            headers = dict(settings.headers)
            async with sse_client(
                settings.url, headers, sse_read_timeout=SSE_IDLE_SECONDS, httpx_client_factory=self._client
            ) as streams:
                yield streams
            return
        if settings.transport == HTTP:
            async with (
                self._client(dict(settings.headers)) as client,
                streamable_http_client(settings.url, http_client=client) as streams,
            ):
                yield streams
            return
        parameters = StdioServerParameters(
            command=sys.executable,  # the package starts servers in new sessions, which would outlive this process
            args=["-I", parent_death.__file__, str(os.getpid()), *settings.command],
            env=None if settings.environment is None else dict(settings.environment),
            cwd=settings.directory,
        )
        async with stdio_client(parameters) as streams:
            yield streams

    def _client(
        self,
        headers: dict[str, str] | None = None,
        timeout: httpx2.Timeout | None = None,
        auth: httpx2.Auth | None = None,
    ) -> httpx2.AsyncClient:
        """Return the package's HTTP client. For a server on this host, the environment's proxies are ignored."""
        import httpx2

        if timeout is None:
            timeout = httpx2.Timeout(HTTP_SECONDS, read=SSE_IDLE_SECONDS)
        return httpx2.AsyncClient(
            headers=headers,
            timeout=timeout,
            auth=auth,
            trust_env=not self._settings.is_on_this_host,
            event_hooks={"response": [self._note_status]},
        )

    async def _note_status(self, response: httpx2.Response) -> None:
        """Remember failed responses, since the package reports some errors without their status."""
        if response.status_code >= HTTP_ERRORS:
            self._status = f"HTTP {response.status_code} {response.reason_phrase}"

    def _cause(self, error: BaseException) -> str:
        """Return the first error of a group (raised by task groups), with a hint if a proxy may be the cause."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        words = describe(error)
        if self._settings.transport == STDIO and "onnection closed" in words:
            words += " (the server has ended; its own messages are above)"
        if self._status and self._status.split()[1] not in words:
            words += f": {self._status}"
        return f"{words}{self._settings.proxy_hint}"


class McpTool:
    """Tool of an MCP server."""

    def __init__(self, server: McpServer, schema: Schema) -> None:
        self.schema = schema
        self._server = server

    async def call(self, episode: EpisodeState, arguments: dict[str, Any]) -> ToolResult:
        return await self._server.call(self.schema["function"]["name"], arguments)

    async def close_episode(self, episode: EpisodeState) -> float | None:
        return None

    async def close(self) -> None:
        await self._server.close()
