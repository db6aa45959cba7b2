"""Connections of a command in the sandbox to the gateway."""

from __future__ import annotations

import contextlib
import resource
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_rl.rollout.gateway.harness import forwarder

OPEN_FILES = 128
"""Default of sandbox.open_files."""
ALONE = """
import asyncio, importlib.util, sys
spec = importlib.util.spec_from_file_location("forwarder", sys.argv[1])
forwarder = importlib.util.module_from_spec(spec)
spec.loader.exec_module(forwarder)
listening = forwarder.listen(0)
print(listening.getsockname()[1], flush=True)
asyncio.run(forwarder.accept(listening, sys.argv[2]))
"""


class Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        while data := self.request.recv(1 << 16):
            self.request.sendall(data)


class Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads, request_queue_size = True, 128


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """Port of a forwarder with the sandbox's limit of open files, whose gateway sends back what it receives."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))

    path = str(tmp_path / "gateway")
    command = [sys.executable, "-c", ALONE, str(forwarder.__file__), path]
    with (
        Server(path, Echo) as server,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=limit) as process,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()
            server.shutdown()


def echoed(connection: socket.socket, data: bytes) -> bytes:
    def send() -> None:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)

    sending = threading.Thread(target=send)
    sending.start()
    found = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    sending.join()
    return found


def test_more_connections_than_open_files_wait_for_others(port: int) -> None:
    with contextlib.ExitStack() as stack:
        connections = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10)) for _ in range(150)
        ]
        for number, connection in enumerate(connections):
            assert echoed(connection, b"%d" % number) == b"%d" % number
            connection.close()
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        assert echoed(connection, b"x" * 10_000_000) == b"x" * 10_000_000


def test_connection_whose_client_leaves_frees_its_place(port: int) -> None:
    for _ in range(3):
        left = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(60)]
        for connection in left:
            connection.sendall(b"half")
            connection.close()
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        assert echoed(connection, b"whole") == b"whole"
