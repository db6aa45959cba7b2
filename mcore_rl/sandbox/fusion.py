"""Client of a SandboxFusion server.

Source: bytedance/SandboxFusion, POST /run_code; retry policy: verl's sandbox_fusion client.
"""

from __future__ import annotations

import base64
import http.client
import json
import time
import urllib.error
import urllib.request
from dataclasses import replace
from typing import Any

from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.errors import SandboxError
from mcore_rl.sandbox.confinement.commands import MIB
from mcore_rl.sandbox.confinement.start import KILLED
from mcore_rl.sandbox.interface import Outcome, Program, Why

GATEWAY_TIMEOUT = 504
"""Status of a proxy whose servers were too slow. A request is repeated only after this status."""
ATTEMPTS = 3
"""Maximum number of attempts per program."""
RETRY_SECONDS = 1.0
"""Delay before the second attempt; it grows by this amount with every further attempt."""
RESPONSE_BYTES = 1 << 20
"""Maximum size of a response without output and files."""
JSON_BYTES_PER_BYTE = 6
"""Upper bound on the JSON encoding of one byte of output."""
READ_BYTES = 1 << 16
GRACE_SECONDS = 10.0
"""Time for the response to arrive, in addition to the limits of compiler and program."""


class FusionSandbox:
    """Sends programs to the server at sandbox.url. Ignores proxies of the environment."""

    def __init__(self, config: SandboxConfig, *, retry_seconds: float = RETRY_SECONDS) -> None:
        self._config = config
        self._retry_seconds = retry_seconds
        self._url = f"{(config.url or '').rstrip('/')}/run_code"
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def run(self, program: Program) -> Outcome:
        """Run a program on the server.

        Raises: SandboxError if the server is unreachable, rejects the request, could not run the program, or sends an
        unknown format.
        """
        seconds = min(program.seconds or self._config.seconds, self._config.seconds)
        request = {
            "code": program.code,
            "language": program.language,
            "compile_timeout": self._config.seconds,
            "run_timeout": seconds,
            "memory_limit_MB": self._config.memory_mib,
            "stdin": program.stdin,
            "files": {path: base64.b64encode(content).decode() for path, content in program.files.items()},
            "fetch_files": list(program.fetch),
        }
        # The compiler may take sandbox.seconds in addition to the program.
        response = self._post(json.dumps(request).encode(), self._config.seconds + seconds + GRACE_SECONDS)
        try:
            return _outcome(response)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SandboxError(
                f"sandbox.url={self._config.url} sent a response in an unknown format: {error!r}"
            ) from error

    def _post(self, body: bytes, timeout: float) -> dict[str, Any]:
        for attempt in range(1, ATTEMPTS + 1):
            request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
            try:
                with self._opener.open(request, timeout=timeout) as response:
                    return json.loads(self._read(response, timeout))  # type: ignore[no-any-return]
            except urllib.error.HTTPError as error:
                with error:
                    message = error.read(1000).decode("utf-8", "replace").strip()
                if error.code != GATEWAY_TIMEOUT or attempt == ATTEMPTS:
                    raise SandboxError(f"sandbox.url={self._config.url} answers {error.code}: {message}") from error
            except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
                raise SandboxError(f"sandbox.url={self._config.url} cannot be used: {error}") from error
            time.sleep(self._retry_seconds * attempt)
        raise AssertionError

    def _read(self, response: http.client.HTTPResponse, seconds: float) -> bytes:
        """Read the body. The program wrote most of it, so its size and duration are limited."""
        limit = RESPONSE_BYTES + JSON_BYTES_PER_BYTE * (
            2 * (self._config.output_kib << 10) + self._config.tmp_mib * MIB
        )
        # The timeout of the socket applies to each read: a server that sends slowly would never reach it.
        body, deadline = bytearray(), time.monotonic() + seconds
        while piece := response.read1(READ_BYTES):
            body += piece
            if len(body) > limit:
                raise SandboxError(
                    f"sandbox.url={self._config.url} answers with more than the {limit} bytes that sandbox.output_kib "
                    "and sandbox.tmp_mib allow"
                )
            if time.monotonic() > deadline:
                raise SandboxError(f"sandbox.url={self._config.url} did not finish its answer in {seconds:g} seconds")
        return bytes(body)


def _outcome(response: dict[str, Any]) -> Outcome:
    if response["status"] == "SandboxError":
        raise SandboxError(f"the sandbox server could not run it: {response.get('message')}")
    if ran := response.get("run_result"):
        files = {path: base64.b64decode(content) for path, content in (response.get("files") or {}).items()}
        return _stage(ran, files)
    compiled = response.get("compile_result")
    if not compiled:
        raise ValueError("neither a compile_result nor a run_result")
    return replace(_stage(compiled, {}), stage="compile")


def _stage(result: dict[str, Any], files: dict[str, bytes]) -> Outcome:
    why: Why = "timeout" if result["status"] == "TimeLimitExceeded" else "exit"
    stdout, stderr = result.get("stdout") or "", result.get("stderr") or ""
    for name, text in (("stdout", stdout), ("stderr", stderr)):
        if not isinstance(text, str):
            raise TypeError(f"{name} is not text")
    code, seconds = result.get("return_code"), float(result.get("execution_time") or 0.0)
    # The server gives no code for a program that it killed.
    return Outcome(why, KILLED if code is None else int(code), stdout, stderr, seconds, files)
