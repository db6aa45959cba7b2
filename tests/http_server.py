"""An ASGI application on a loopback port, in a thread of the test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import uvicorn


@contextmanager
def serving_application(app: Callable[..., object], lifespan: Literal["auto", "off"] = "auto") -> Iterator[str]:
    """Serve an application in the block. Yields the server's address. lifespan: uvicorn's option."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", lifespan=lifespan)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            thread.join(0.01)
            assert thread.is_alive()
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
