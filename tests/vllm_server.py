"""A real vLLM server in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from mcore_rl.runtime.addresses import free_port


@contextlib.contextmanager
def vllm_server(model: Path, length: int, key: str) -> Iterator[str]:
    """Address of a running vLLM server for sequences of up to `length` tokens, with the API key `key`."""
    port = free_port()
    words = ["--model", str(model), "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    words += ["--max-model-len", str(length), "--served-model-name", "the-model"]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_API_KEY": key}
    server = subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        until = time.monotonic() + 240
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert server.poll() is None, "vLLM's server ended"
            assert time.monotonic() < until, "vLLM's server does not listen"
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()  # SIGKILL would leave its shared memory behind
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
