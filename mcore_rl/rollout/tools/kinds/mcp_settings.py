"""Settings of an MCP server, and detection of a proxy between it and this host."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from mcore_rl.config.reading.expansion import expand_path
from mcore_rl.errors import ConfigError

STDIO, SSE, HTTP = "stdio", "sse", "streamable-http"
_TRANSPORTS = {"stdio": STDIO, "sse": SSE, "http": HTTP, "streamable-http": HTTP, "streamable_http": HTTP}


@dataclass(frozen=True)
class ServerSettings:
    """Address of a server: a command to start, or a URL."""

    transport: str
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None
    directory: str | None = None
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, origin: str, given: Any) -> ServerSettings:
        """Read {"command", "args", "env", "cwd"} or {"url", "headers" or "auth_token", "type"}; `origin` names file and
        server.

        Raises: ConfigError for an invalid value, or a command or directory that does not exist.
        """
        if not isinstance(given, dict) or not ({"command", "url"} & given.keys()):
            raise ConfigError(f"{origin} has neither command nor url; give one of them")
        named = given.get("type", given.get("transport", SSE if _is_sse(given.get("url")) else None))
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
        return cls(STDIO, (command, *map(str, arguments)), environment, directory)

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


def _is_sse(url: Any) -> bool:
    return isinstance(url, str) and urlsplit(url).path.rstrip("/").endswith("/sse")


def _command(origin: str, command: Any, environment: Mapping[str, str], directory: str | None) -> str:
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


def _texts(origin: str, name: str, given: Any) -> dict[str, str] | None:
    if given is None:
        return None
    if not isinstance(given, dict) or not all(isinstance(value, str | int | float) for value in given.values()):
        raise ConfigError(f"{origin}: {name} must be a mapping of texts")
    return {str(key): str(value) for key, value in given.items()}
