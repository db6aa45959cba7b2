"""Start of a command in the sandbox, where only the gateway is reachable.

It runs inside, in the sandbox's Python: it forwards connections to a port of the sandbox's own loopback interface to
the gateway's unix socket, starts the command, and ends with its exit code. It reads its orders from a file, which it
removes: command lines are visible to other users of the host. It needs the standard library only.
"""

import asyncio
import contextlib
import json
import os
import resource
import socket
import subprocess
import threading

ORDERS = ".gateway.json"
PORT = 8000
OWN_FILES = 32
"""Open files of this process besides connections."""


async def copy(source: socket.socket, target: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):
        while data := await loop.sock_recv(source, 1 << 16):
            await loop.sock_sendall(target, data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


async def forward(client: socket.socket, path: str) -> None:
    gateway = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # Without a gateway, the client sees that its connection is closed.
    with client, gateway, contextlib.suppress(OSError):
        gateway.setblocking(False)
        await asyncio.get_running_loop().sock_connect(gateway, path)
        await asyncio.gather(copy(client, gateway), copy(gateway, client))


def listen(port: int) -> socket.socket:
    listening = socket.create_server(("127.0.0.1", port), backlog=128)
    # Accepted connections inherit it. Otherwise the body of a reply waits until the client has acknowledged its head.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


async def accept(listening: socket.socket, path: str) -> None:
    """Forward connections. Those beyond the limit of open files wait until others are closed."""
    listening.setblocking(False)
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    places = asyncio.Semaphore(max((soft_limit - OWN_FILES) // 2, 1))
    tasks: set[asyncio.Task[None]] = set()  # the loop itself does not keep tasks alive

    def end(task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        places.release()

    while True:
        await places.acquire()
        client, _ = await asyncio.get_running_loop().sock_accept(listening)
        task = asyncio.create_task(forward(client, path))
        tasks.add(task)
        task.add_done_callback(end)


def main() -> None:
    with open(ORDERS) as file:
        orders = json.load(file)
    os.remove(ORDERS)
    threading.stack_size(1 << 18)
    listening = listen(PORT)
    threading.Thread(target=lambda: asyncio.run(accept(listening, orders["socket"])), daemon=True).start()
    command = subprocess.Popen(orders["command"], env={**os.environ, **orders["environment"]})
    code = command.wait()
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
