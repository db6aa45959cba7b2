"""Start of a command in the sandbox, where only the gateway is reachable.

It runs inside, in the sandbox's Python: it forwards connections to a port of the sandbox's own loopback interface to
the gateway's unix socket, starts the command, and ends with its exit code. It reads its orders from a file, which it
removes: command lines are visible to other users of the host. It needs the standard library only.
"""

import contextlib
import json
import os
import socket
import subprocess
import threading

ORDERS = ".gateway.json"
PORT = 8000


def copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def forward(client: socket.socket, path: str) -> None:
    gateway = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with client, gateway:
        gateway.connect(path)
        answering = threading.Thread(target=copy, args=(gateway, client), daemon=True)
        answering.start()
        copy(client, gateway)
        answering.join()


def listen(port: int) -> socket.socket:
    listening = socket.create_server(("127.0.0.1", port), backlog=128)
    # Accepted connections inherit it. Otherwise the body of a reply waits until the client has acknowledged its head.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def accept(listening: socket.socket, path: str) -> None:
    while True:
        client, _ = listening.accept()
        threading.Thread(target=forward, args=(client, path), daemon=True).start()


def main() -> None:
    with open(ORDERS) as file:
        orders = json.load(file)
    os.remove(ORDERS)
    threading.stack_size(1 << 18)
    listening = listen(PORT)
    threading.Thread(target=accept, args=(listening, orders["socket"]), daemon=True).start()
    command = subprocess.Popen(orders["command"], env={**os.environ, **orders["environment"]})
    code = command.wait()
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
