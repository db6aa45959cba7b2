"""The gateway of a host: its event loop in a thread, with the HTTP server and the socket for engines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import socket
import sys
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Self

import uvicorn
import uvloop

from mcore_rl.errors import ConfigError
from mcore_rl.rollout.gateway.app import application
from mcore_rl.rollout.gateway.hub import Hub
from mcore_rl.rollout.gateway.wire import GatewayAddress

MAX_BODY_BYTES = 64 << 20
"""Maximum size of a request: a conversation of about ten million tokens."""
BACKLOG = 2048
KEEP_ALIVE_SECONDS = 600
"""Time for which an idle connection stays open: clients reuse it for the next request of their session."""


class GatewayServer:
    """A running gateway; `address` is where it listens. Use it as a context manager.

    model: name of the model in replies.
    host, port: where clients connect over the network; port 0: a free one.
    advertised: host name in the address for clients.
    serves: answer requests without a session. room: maximum number of them that an engine has at a time.

    Raises: ConfigError if it cannot listen there.
    """

    def __init__(
        self, model: str, host: str, port: int, advertised: str, *, serves: bool = False, room: int = sys.maxsize
    ) -> None:
        listening = _listen(host, port)  # first: it may fail, and then nothing is left behind
        self._directory = tempfile.mkdtemp(prefix="mcore_rl_gateway_")
        # Programs in sandboxes have other user ids; they reach the socket for clients and cannot list the directory.
        os.chmod(self._directory, 0o711)
        token = secrets.token_urlsafe(32)
        for_engines, for_clients = Path(self._directory, "engines"), Path(self._directory, "clients", "socket")
        for_clients.parent.mkdir(mode=0o711)
        named = f"[{advertised}]" if ":" in advertised else advertised
        url = f"http://{named}:{listening.getsockname()[1]}"
        self.address = GatewayAddress(str(for_engines), token, url, str(for_clients))
        self._serves, self._room = serves, room
        self.failure: BaseException | None = None
        """Error that has ended the server."""
        self._model, self._sockets = model, [listening, _unix_socket(for_clients)]
        self._stop: asyncio.Event | None = None
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)
        self._thread.start()
        self._ready.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections and remove the sockets."""
        if self._stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _run(self) -> None:
        try:
            uvloop.run(self._serve())
        except BaseException as error:
            self.failure = error
            if not self._ready.done():
                self._ready.set_exception(error)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        hub = Hub(self.address.token, self._room)
        token = self.address.token
        app = application(hub, model=self._model, admin_token=token, max_body_bytes=MAX_BODY_BYTES, serves=self._serves)
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=1,
        )
        server = _Server(config)
        engines = await asyncio.start_unix_server(hub.connected, self.address.socket)
        os.chmod(self.address.socket, 0o600)
        serving = asyncio.create_task(server.serve(self._sockets))
        stopping = asyncio.create_task(self._stop.wait())
        self._ready.set_result(None)
        try:
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not stopping.done():
                raise RuntimeError("its HTTP server has ended")
        finally:
            server.should_exit = True
            engines.close()
            await serving
            stopping.cancel()


class _Server(uvicorn.Server):
    """Server that leaves the signals of its process alone."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted connections inherit it. Otherwise TCP holds the body of a reply back for 40 ms, until the client has
    # acknowledged the head. Not every event loop sets it for a socket that it did not make.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"rollout.gateway_address={host} rollout.gateway_port={port}: the gateway cannot listen there: "
            f"{error.strerror}; set an address of this host and a free port (0: any)"
        ) from None
    # Before the address is known: the HTTP server listens later, and connections until then wait for it.
    listening.listen(BACKLOG)
    return listening


def _unix_socket(path: Path) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(str(path))
    os.chmod(path, 0o666)
    listening.listen(BACKLOG)
    return listening
