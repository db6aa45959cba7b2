"""Tools of a real MCP server in a child process."""

from __future__ import annotations

import asyncio
import base64
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.errors import ConfigError
from mcore_rl.rollout.tools.kinds.mcp_servers import HTTP, SSE, ServerSettings
from mcore_rl.rollout.tools.toolbox import ToolBox, check_tools
from mcore_rl.runtime.addresses import free_port
from tests.unit.rollout.tools.made import alive, load, with_tools
from tests.vision_models import png

SERVER = '''
import os, sys
from mcp.server import MCPServer
from mcp.types import ImageContent, TextContent

PICTURE = "{PICTURE}"

server = MCPServer("t")

@server.tool()
def add(a: int, b: int = 1) -> int:
    """Adds."""
    if a < 0:
        raise ValueError("negative")
    return a + b

@server.tool()
def whereabouts() -> str:
    """The server's process."""
    return f"{os.getpid()} {os.environ.get('COLOUR')}"

@server.tool()
def photo():
    """Returns a picture."""
    return [TextContent(type="text", text="seen"), ImageContent(type="image", data=PICTURE, mime_type="image/png")]

@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(1)

if len(sys.argv) > 1:
    server.run(sys.argv[2], port=int(sys.argv[1]))
else:
    server.run("stdio")
'''


def tools_file(folder: Path, server: dict[str, Any], selected: str = "") -> str:
    (folder / "servers.json").write_text(json.dumps({"mcpServers": {"mine": server}}))
    (folder / "tools.yaml").write_text(
        f"tools: [{{mcp: {{mcp_servers_config_path: servers.json{selected}}}, config: {{type: mcp}}, retries: 1}}]"
    )
    return str(folder / "tools.yaml")


def stdio_server(folder: Path) -> dict[str, Any]:
    (folder / "server.py").write_text(SERVER.replace("{PICTURE}", base64.b64encode(png(8, 8)).decode()))
    return {"command": sys.executable, "args": [str(folder / "server.py")], "env": {"COLOUR": "green"}}


@pytest.mark.slow
def test_mcp_server_on_stdio_answers(tmp_path: Path) -> None:
    async def use(box: ToolBox) -> list[Any]:
        calls = [("add", {"a": 1}), ("add", {"a": "x"}), ("add", {"a": -1}), ("whereabouts", {}), ("whereabouts", {})]
        answers = [await box.call(f"e{i}", name, arguments) for i, (name, arguments) in enumerate(calls)]
        many = await asyncio.gather(*(box.call("e", "add", {"a": i}) for i in range(50)))
        photo = await box.call("e", "photo", {})
        died = await box.call("e", "die", {})
        return [
            [schema["function"] for schema in box.schemas],
            *answers,
            many,
            photo,
            died,
            await box.call("e", "add", {"a": 5}),
        ]

    shown, two, wrong, negative, here, again, many, photo, died, after = with_tools(
        tools_file(tmp_path, stdio_server(tmp_path)), use
    )
    assert [function["name"] for function in shown] == ["add", "whereabouts", "photo", "die"]
    assert shown[0]["parameters"]["required"] == ["a"]
    assert (two.text, two.error) == ("2", None)
    assert wrong.error == "argument a: 'x' is not of type 'integer'"  # before the server is called
    assert (negative.text, negative.error is not None) == (f"Error: {negative.error}", True)
    assert here.text == again.text  # all episodes share one server
    assert here.text.endswith(" green")
    assert [answer.text for answer in many] == [str(i + 1) for i in range(50)]
    assert (photo.text, photo.images) == ("seen", (png(8, 8),))
    assert died.error == "RetryableToolError: the MCP server closed the connection"
    assert after.text == "6"  # from a restarted server


def test_mcp_server_ends_with_the_tool_process(tmp_path: Path) -> None:
    """The package starts the server in a new session, and the server ignores the end of its input."""
    server = stdio_server(tmp_path)
    script = tmp_path / "server.py"
    script.write_text(script.read_text() + "\nimport time\ntime.sleep(600)\n")

    async def use(box: ToolBox) -> int:
        number = int((await box.call("e", "whereabouts", {})).text.split()[0])
        assert alive(number)
        os.kill(box._processes[0].pid, signal.SIGKILL)
        return number

    number = with_tools(tools_file(tmp_path, server), use)
    deadline = time.monotonic() + 60
    while alive(number) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(number)


@contextmanager
def http_server(folder: Path, transport: str) -> Iterator[int]:
    """Start a server on a free port of this host."""
    port = free_port()
    stdio_server(folder)
    command = [sys.executable, str(folder / "server.py"), str(port), transport]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert server.poll() is None
            time.sleep(0.1)
        yield port
    finally:
        server.kill()
        server.wait()


def test_server_settings_transport_follows_type_and_path() -> None:
    for path, settings, transport in (
        ("mcp", {}, HTTP),
        ("mcp", {"type": "http"}, HTTP),
        ("sse", {}, SSE),
        ("mcp", {"transport": "sse"}, SSE),
    ):
        assert ServerSettings.of("", {"url": f"http://localhost/{path}", **settings}).transport == transport


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "path"), [("streamable-http", "mcp"), ("sse", "sse")])
def test_mcp_server_over_http_and_sse_needs_no_proxy_on_this_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str, path: str
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # no server listens on this port
    with http_server(tmp_path, transport) as port:
        spec = tools_file(tmp_path, {"url": f"http://127.0.0.1:{port}/{path}"}, ", tool_selected_list: [add]")

        async def use(box: ToolBox) -> tuple[int, list[str]]:
            answers = await asyncio.gather(*(box.call("e", "add", {"a": i}) for i in range(5)))
            return len(box.schemas), [answer.text for answer in answers]

        assert with_tools(spec, use) == (1, ["1", "2", "3", "4", "5"])


class Refusing(http.server.BaseHTTPRequestHandler):
    """Proxy that reaches no server."""

    def do_POST(self) -> None:
        self.send_error(502)

    do_GET = do_POST

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.mark.parametrize("path", ["mcp", "sse"])
def test_mcp_server_behind_a_failing_proxy_is_reported_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        monkeypatch.setenv("HTTP_PROXY", f"http://user:secret@127.0.0.1:{proxy.server_port}")
        for name in ("http_proxy", "NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        spec = tools_file(tmp_path, {"url": f"http://tools.invalid/{path}"})
        with pytest.raises(ConfigError, match=r"mine does not answer: .*NO_PROXY=tools\.invalid avoids it") as told:
            load(spec)
        proxy.shutdown()
    assert f"through http://127.0.0.1:{proxy.server_port} of HTTP_PROXY" in str(told.value)
    assert "secret" not in str(told.value)
    assert "502" in str(told.value)


@pytest.mark.parametrize(
    ("server", "told"),
    [
        ({"command": "/no/such/command"}, "server mine: the command /no/such/command is not there"),
        ({"command": "no-such-command"}, r"server mine: the command no-such-command is not in PATH"),
        ({"command": "python -m x"}, "put its arguments into args"),
        ({"command": ["python"]}, "command must be the name or the path of a program"),
        ({"command": "true", "args": "-m"}, "args must be a list"),
        ({"command": "true", "cwd": "/no/such"}, "cwd /no/such is not a directory"),
        ({"command": "true", "env": {"A": None}}, "env must be a mapping of texts"),
        ({"url": "localhost:80"}, "url 'localhost:80' must be http"),
        ({"url": "http://x", "type": "carrier"}, "type 'carrier' must be one of stdio, sse"),
        ({"args": []}, "server mine has neither command nor url"),
    ],
)
def test_mcp_settings_errors_name_file_and_server(tmp_path: Path, server: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=rf"tools.yaml: tools\[0\].mcp.*{told}"):
        load(tools_file(tmp_path, server))


@pytest.mark.slow
def test_mcp_server_errors_are_found_before_the_run(tmp_path: Path) -> None:
    missing = ", tool_selected_list: [subtract]"
    for server, selected, told in (
        ({"command": "true"}, "", "server mine does not answer: .*its own messages are above"),
        (stdio_server(tmp_path), missing, "no server has a tool subtract; they have: add, whereabouts, photo, die"),
    ):
        with pytest.raises(ConfigError, match=rf"tools.yaml: tools\[0\].mcp.*{told}"):
            check_tools(RolloutConfig(tools=tools_file(tmp_path, server, selected)), SandboxConfig())
