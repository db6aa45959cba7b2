"""Programs on a SandboxFusion server.

Source: bytedance/SandboxFusion, POST /run_code; when to ask again: verl's sandbox_fusion client.
"""

from __future__ import annotations

import base64
import http.client
import json
import time
import urllib.error
import urllib.request
from typing import Any

from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.errors import SandboxError
from mcore_rl.sandbox.confinement.limits import MIB
from mcore_rl.sandbox.confinement.start import KILLED
from mcore_rl.sandbox.interface import Outcome, Program, Why

GATEWAY_TIMEOUT = 504
ATTEMPTS = 3
RETRY_SECONDS = 1.0
"""Before the second attempt; each later one waits so much longer."""
ANSWER_BYTES = 1 << 20
"""Of an answer, for all but output and files."""
BYTES_IN_JSON = 6
"""At most, for one byte of output."""
_PIECE_BYTES = 1 << 16
GRACE_SECONDS = 10.0
"""Beyond the time of compiler and program, for the answer to come."""


class FusionSandbox:
    """Asks the server of sandbox.url, directly, whatever proxy the environment names."""

    def __init__(self, config: SandboxConfig, *, retry_seconds: float = RETRY_SECONDS) -> None:
        self._config = config
        self._retry_seconds = retry_seconds
        self._url = f"{(config.url or '').rstrip('/')}/run_code"
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def run(self, program: Program) -> Outcome:
        """Raises: SandboxError if the server is not there, refuses, could not run it, or answers something else."""
        seconds = min(program.seconds or self._config.seconds, self._config.seconds)
        compile_seconds = min(program.compile_seconds or self._config.seconds, self._config.seconds)
        memory_mib = min(program.memory_mib or self._config.memory_mib, self._config.memory_mib)
        request = {
            "code": program.code,
            "language": program.language,
            "compile_timeout": compile_seconds,
            "run_timeout": seconds,
            "memory_limit_MB": memory_mib,
            "stdin": program.stdin,
            "files": {path: base64.b64encode(content).decode() for path, content in program.files.items()},
            "fetch_files": list(program.fetch),
        }
        answer = self._ask(json.dumps(request).encode(), compile_seconds + seconds + GRACE_SECONDS)
        try:
            return _outcome(answer)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SandboxError(f"sandbox.url={self._config.url} answers in another form: {error!r}") from error

    def _ask(self, body: bytes, timeout: float) -> dict[str, Any]:
        for attempt in range(1, ATTEMPTS + 1):
            request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
            try:
                with self._opener.open(request, timeout=timeout) as response:
                    return json.loads(self._body(response, timeout))  # type: ignore[no-any-return]
            except urllib.error.HTTPError as error:
                with error:
                    words = error.read(1000).decode("utf-8", "replace").strip()
                if error.code != GATEWAY_TIMEOUT or attempt == ATTEMPTS:
                    raise SandboxError(f"sandbox.url={self._config.url} answers {error.code}: {words}") from error
            except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
                raise SandboxError(f"sandbox.url={self._config.url} cannot be asked: {error}") from error
            time.sleep(self._retry_seconds * attempt)
        raise AssertionError

    def _body(self, response: http.client.HTTPResponse, seconds: float) -> bytes:
        """The answer. Much of it was written by the program, so its size and its time are limited."""
        limit = ANSWER_BYTES + BYTES_IN_JSON * (2 * (self._config.output_kib << 10) + self._config.tmp_mib * MIB)
        body, deadline = bytearray(), time.monotonic() + seconds
        while piece := response.read1(_PIECE_BYTES):
            body += piece
            if len(body) > limit:
                raise SandboxError(
                    f"sandbox.url={self._config.url} answers with more than the {limit} bytes that sandbox.output_kib "
                    "and sandbox.tmp_mib allow"
                )
            if time.monotonic() > deadline:
                raise SandboxError(f"sandbox.url={self._config.url} did not finish its answer in {seconds:g} seconds")
        return bytes(body)


def _outcome(answer: dict[str, Any]) -> Outcome:
    if answer["status"] == "SandboxError":
        raise SandboxError(f"the sandbox server could not run it: {answer.get('message')}")
    compiled, ran = answer.get("compile_result"), answer.get("run_result")
    files = {path: base64.b64decode(content) for path, content in (answer.get("files") or {}).items()}
    compilation = _stage(compiled, {}) if compiled else None
    if ran:
        outcome = _stage(ran, files)
        return Outcome(**{**vars(outcome), "compilation": compilation})
    if compilation is None:
        raise ValueError("neither a compile_result nor a run_result")
    return Outcome(**{**vars(compilation), "stage": "compile"})


def _stage(result: dict[str, Any], files: dict[str, bytes]) -> Outcome:
    why: Why = "timeout" if result["status"] == "TimeLimitExceeded" else "exit"
    code = result.get("return_code")
    for name in ("stdout", "stderr"):
        if not isinstance(result.get(name) or "", str):
            raise TypeError(f"{name} is no text")
    return Outcome(
        why=why,
        return_code=KILLED if code is None else int(code),
        stdout=result.get("stdout") or "",
        stderr=result.get("stderr") or "",
        seconds=float(result.get("execution_time") or 0.0),
        files=files,
    )
