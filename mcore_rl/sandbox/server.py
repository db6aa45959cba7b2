"""A server with SandboxFusion's interface over this machine's sandbox: POST /run_code, POST /run_jupyter, GET /v1/ping.

    python -m mcore_rl.sandbox.server --port 8080 sandbox.seconds=20

It asks nobody who they are, so it listens on loopback unless --host says otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import FrameType
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mcore_rl.config.fields import check_domains
from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.errors import ConfigError, McoreRLError
from mcore_rl.sandbox import cell_requests, code_requests
from mcore_rl.sandbox.check import check_local
from mcore_rl.sandbox.interface import Sandbox
from mcore_rl.sandbox.local import LocalSandbox

MAX_REQUEST_BYTES = 64 << 20
QUEUE_SECONDS = 10.0
"""A request that has not got its turn by then is told to come again: clients wait so much longer than a run takes."""


SERVED: dict[str, Callable[[bytes], Callable[[Sandbox], dict[str, Any]]]] = {
    "/run_code": code_requests.read,
    "/run_jupyter": cell_requests.read,
}
"""Path -> what reads a request and returns what answers it."""


class SandboxServer(ThreadingHTTPServer):
    """Serves until shutdown(); port 0 takes a free one."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], sandbox: Sandbox, max_running: int, queue_seconds: float) -> None:
        super().__init__(address, _Handler)
        self.sandbox = sandbox
        self.turns = threading.Semaphore(max_running)
        self.queue_seconds = queue_seconds


def serve(config: SandboxConfig, host: str, port: int, *, queue_seconds: float = QUEUE_SECONDS) -> SandboxServer:
    """A server that is bound; its serve_forever() is the caller's. Raises: ConfigError where the address is taken."""
    max_running = config.max_running or len(os.sched_getaffinity(0))
    try:
        return SandboxServer((host, port), LocalSandbox(config), max_running, queue_seconds)
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port}: {error.strerror}; choose another") from error


class _Handler(BaseHTTPRequestHandler):
    server: SandboxServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/v1/ping":
            self._answer(200, "pong")
        else:
            self._answer(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > MAX_REQUEST_BYTES:
            self.close_connection = True
            self._answer(413, {"detail": f"a request has a Content-Length of at most {MAX_REQUEST_BYTES}"})
            return
        body = self.rfile.read(int(length))
        if self.path not in SERVED:
            self._answer(404, {"detail": f"{self.path} is not served here, only {' and '.join(SERVED)}"})
            return
        try:
            run = SERVED[self.path](body)
        except ValueError as error:
            self._answer(422, {"detail": str(error)})
            return
        if not self.server.turns.acquire(timeout=self.server.queue_seconds):
            self._answer(504, {"detail": "all sandboxes are busy"})
            return
        try:
            answer = run(self.server.sandbox)
        finally:
            self.server.turns.release()
        self._answer(200, answer)

    def _answer(self, code: int, answer: object) -> None:
        body = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Not every program is news."""


def read_config(overrides: Sequence[str]) -> SandboxConfig:
    """Of words such as sandbox.seconds=20. Raises: ConfigError."""
    for word in overrides:
        if not word.startswith("sandbox.") or "=" not in word:
            raise ConfigError(f"{word}: write sandbox.KEY=VALUE")
    try:
        tree = OmegaConf.from_dotlist([word.removeprefix("sandbox.") for word in overrides])
        config: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(SandboxConfig), tree))
    except OmegaConfBaseException as error:
        raise ConfigError(f"sandbox.{error.full_key}: {str(error).splitlines()[0]}") from None
    check_domains(config, "sandbox.")
    assert isinstance(config, SandboxConfig)
    return config


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until SIGINT or SIGTERM comes, also where whoever started it had it ignore SIGINT, as shells do with what
    they start in the background."""
    parser = argparse.ArgumentParser(prog="python -m mcore_rl.sandbox.server", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080, help="0: a free one")
    parser.add_argument("overrides", nargs="*", metavar="sandbox.KEY=VALUE")
    options = parser.parse_args(arguments)
    try:
        config = read_config(options.overrides)
        check_local(config)
        server = serve(config, options.host, options.port)
    except McoreRLError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    with server:
        print(f"sandbox: http://{server.server_address[0]!s}:{server.server_address[1]}", flush=True)
        server.serve_forever()
    return 0


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
