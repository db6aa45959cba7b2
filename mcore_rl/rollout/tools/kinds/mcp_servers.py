"""Tools of MCP servers, over standard input and output, HTTP or SSE. Only this module imports the `mcp` package.

Each tool process runs a server once, not per episode: the protocol has no state of an episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from mcore_rl import parent_death
from mcore_rl.config.functions import describe
from mcore_rl.config.reading.expansion import expand_path
from mcore_rl.config.reading.json_files import read_json_object
from mcore_rl.errors import ConfigError
from mcore_rl.rollout.tools.images import decoded
from mcore_rl.rollout.tools.interface import EpisodeState, RetryableToolError, Tool, ToolError, ToolResult, as_text
from mcore_rl.rollout.tools.schemas import Schema, checked_schema

if TYPE_CHECKING:
    import httpx2
    from mcp import ClientSession
    from mcp.types import Tool as ListedTool

STDIO, SSE, HTTP = "stdio", "sse", "streamable-http"
_TRANSPORTS = {"stdio": STDIO, "sse": SSE, "http": HTTP, "streamable-http": HTTP, "streamable_http": HTTP}
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


def read_servers(origin: str, path: Path) -> list[McpServer]:
    """Read the servers of a JSON file with `mcpServers` (see ServerSettings).

    Raises: ConfigError.
    """
    servers = read_json_object(path, origin).get("mcpServers")
    if not isinstance(servers, dict) or not servers:
        raise ConfigError(f'{origin} must hold {{"mcpServers": {{NAME: {{"command": ...}} or {{"url": ...}}}}}}')
    return [McpServer(f"{origin}: server {name}", given) for name, given in servers.items()]


@dataclass(frozen=True)
class ServerSettings:
    """Address of a server: a command to start, or a URL."""

    transport: str
    url: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    process: Mapping[str, object] = field(default_factory=dict)
    """Fields of StdioServerParameters."""

    @classmethod
    def of(cls, origin: str, given: object) -> ServerSettings:
        """Read {"command", "args", "env", "cwd"} or {"url", "headers" or "auth_token", "type"}; `origin` names file and
        server.

        Raises: ConfigError for an invalid value, or a command or directory that does not exist.
        """
        if not isinstance(given, dict) or not ({"command", "url"} & given.keys()):
            raise ConfigError(f"{origin} has neither command nor url; give one of them")
        is_sse = urlsplit(str(given.get("url"))).path.rstrip("/").endswith("/sse")
        named = given.get("type", given.get("transport", SSE if is_sse else None))
        if named is not None and named not in _TRANSPORTS:
            raise ConfigError(f"{origin}: type {named!r} must be one of {', '.join(_TRANSPORTS)}")
        environment = _texts(origin, "env", given.get("env"))
        if "url" in given and named != STDIO:
            token, url = given.get("auth_token"), given["url"]
            if not isinstance(url, str) or urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
                raise ConfigError(f"{origin}: url {url!r} must be http://HOST... or https://HOST...")
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            headers |= _texts(origin, "headers", given.get("headers")) or {}
            return cls(_TRANSPORTS[named] if named else HTTP, url=url, headers=headers)
        if "command" not in given or named in ("sse", "http", "streamable-http", "streamable_http"):
            raise ConfigError(f"{origin}: type {named!r} needs {'command' if named == STDIO else 'url'}")
        arguments = given.get("args") or []
        if not isinstance(arguments, list) or not all(isinstance(each, str | int | float) for each in arguments):
            raise ConfigError(f"{origin}: args must be a list of texts")
        directory = given.get("cwd")
        if directory is not None:
            directory = expand_path(f"{origin}: cwd", str(directory))
            if not os.path.isdir(directory):
                raise ConfigError(f"{origin}: cwd {directory} is not a directory")
        command = _command(origin, given["command"], environment or {}, directory)
        # The package starts servers in new sessions, which would outlive this process without parent_death.
        words = ["-I", parent_death.__file__, str(os.getpid()), command, *map(str, arguments)]
        process = {"command": sys.executable, "args": words, "env": environment, "cwd": directory}
        return cls(STDIO, process=process)

    @property
    def is_on_this_host(self) -> bool:
        """True if the URL has a loopback address, for which proxies are not used."""
        host = urlsplit(self.url).hostname or ""
        if host == "localhost" or host.endswith(".localhost"):
            return True
        try:
            return ip_address(host).is_loopback
        except ValueError:
            return False

    @property
    def proxy_hint(self) -> str:
        """Hint for error messages if a proxy is used; empty otherwise."""
        parts = urlsplit(self.url)
        host, proxies = parts.hostname or "", getproxies()
        name = parts.scheme if parts.scheme in proxies else "all"
        if not host or self.is_on_this_host or name not in proxies or proxy_bypass(host):
            return ""
        proxy = urlsplit(proxies[name])
        shown = f"{proxy.scheme}://{proxy.hostname}:{proxy.port}" if proxy.hostname else "a proxy"
        return f" (through {shown} of {name.upper()}_PROXY; NO_PROXY={host} avoids it)"


def _command(origin: str, command: object, environment: Mapping[str, str], directory: str | None) -> str:
    if not isinstance(command, str) or not command:
        raise ConfigError(f"{origin}: command must be the name or the path of a program, its arguments go into args")
    command = expand_path(f"{origin}: command", command)
    path = environment.get("PATH", os.environ.get("PATH"))
    place = command if os.sep not in command else os.path.join(directory or os.curdir, command)
    if shutil.which(place, path=path) is None:
        words = "; put its arguments into args" if " " in command else ""
        where = f"in PATH ({path})" if os.sep not in command else "there, or it is not executable"
        raise ConfigError(f"{origin}: the command {command} is not {where}; install it, or give its whole path{words}")
    return command


def _texts(origin: str, name: str, given: object) -> dict[str, str] | None:
    if given is None:
        return None
    if not isinstance(given, dict) or not all(isinstance(value, str | int | float) for value in given.values()):
        raise ConfigError(f"{origin}: {name} must be a mapping of texts")
    return {str(key): str(value) for key, value in given.items()}


class McpServer:
    """Connection to a server, opened on first use and again after it breaks."""

    def __init__(self, origin: str, given: object) -> None:
        self._origin, self._settings = origin, ServerSettings.of(origin, given)
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
        functions = (
            {"name": info.name, "description": info.description or "", "parameters": info.input_schema}
            for info in infos
        )
        return [McpTool(self, checked_schema(self._origin, {"function": function})) for function in functions]

    async def call(self, name: str, arguments: dict[str, object]) -> ToolResult:
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
        images = [part for part in result.content if part.type == "image"]
        parts = [getattr(part, "text", None) or f"[{part.type}]" for part in result.content if part not in images]
        text = "\n".join(parts) or as_text(result.structured_content or "")
        if result.is_error:
            raise ToolError(text)
        return ToolResult(text, images=tuple(decoded(part.data, f"image {n}") for n, part in enumerate(images, 1)))

    async def close(self) -> None:
        runner, self._runner = self._runner, None
        self._closing.set()
        if runner is not None:
            await asyncio.wait({runner})

    async def _list(self) -> list[ListedTool]:
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
        try:
            async with contextlib.AsyncExitStack() as stack:
                connected.set_result(await self._connect(stack))
                await closing.wait()
        except Exception as error:  # any error of the transport; the session has passed it to running calls
            if not connected.done():
                connected.set_exception(error)
                connected.exception()  # mark as retrieved, since the caller may have given up

    async def _connect(self, stack: contextlib.AsyncExitStack) -> ClientSession:
        from mcp import ClientSession, StdioServerParameters, stdio_client
        from mcp.client.sse import sse_client
        from mcp.client.streamable_http import streamable_http_client

        url, headers = self._settings.url, self._settings.headers
        if self._settings.transport == STDIO:
            streams = stdio_client(StdioServerParameters.model_validate(self._settings.process))
        elif self._settings.transport == SSE:
            streams = sse_client(url, headers, sse_read_timeout=SSE_IDLE_SECONDS, httpx_client_factory=self._client)
        else:
            client = await stack.enter_async_context(self._client(headers))
            streams = streamable_http_client(url, http_client=client)
        session = await stack.enter_async_context(ClientSession(*await stack.enter_async_context(streams)))
        await session.initialize()
        return session

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
        trusted, hooks = not self._settings.is_on_this_host, {"response": [self._note_status]}
        return httpx2.AsyncClient(headers=headers, timeout=timeout, auth=auth, trust_env=trusted, event_hooks=hooks)

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


class McpTool(Tool):
    """Tool of an MCP server."""

    def __init__(self, server: McpServer, schema: Schema) -> None:
        self.schema = schema
        self._server = server

    async def call(self, episode: EpisodeState, arguments: dict[str, object]) -> ToolResult:
        return await self._server.call(self.schema["function"]["name"], arguments)

    async def close(self) -> None:
        await self._server.close()
