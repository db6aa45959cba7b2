"""Client of a SandboxFusion server, against a server that sends scripted responses."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import pytest

from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.errors import ConfigError, SandboxError
from mcore_rl.sandbox.check import check_sandbox
from mcore_rl.sandbox.fusion import FusionSandbox
from mcore_rl.sandbox.interface import Program


class Scripted(BaseHTTPRequestHandler):
    """Sends the responses of the test in order and records the requests."""

    responses: ClassVar[list[tuple[int, bytes]]] = []
    requests: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        self.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        code, body = self.responses.pop(0)
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Scripted.responses, Scripted.requests = [], []
    with HTTPServer(("127.0.0.1", 0), Scripted) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def response(status: str, compiled: object = None, ran: object = None, **fields: object) -> tuple[int, bytes]:
    """Successful HTTP response with SandboxFusion's fields."""
    body = {"status": status, "message": "", "executor_pod_name": "pod", "files": {}}
    return 200, json.dumps({**body, "compile_result": compiled, "run_result": ran, **fields}).encode()


def stage(code: int | None, status: str = "Finished", **fields: str) -> dict[str, Any]:
    return {"status": status, "execution_time": 0.5, "return_code": code, "stdout": "", "stderr": "", **fields}


COMPILE_FAILED = response("Failed", stage(1, stderr="no"))


def test_request_has_the_fields_of_the_server(url: str) -> None:
    Scripted.responses = [COMPILE_FAILED]
    program = Program("c", "cpp", stdin="s", files={"f": b"x"}, fetch=("o",), seconds=2)
    outcome = FusionSandbox(SandboxConfig(url=url + "/", seconds=3, memory_mib=100)).run(program)
    assert Scripted.requests == [
        {
            "code": "c", "language": "cpp", "compile_timeout": 3, "run_timeout": 2, "memory_limit_MB": 100,
            "stdin": "s", "files": {"f": "eA=="}, "fetch_files": ["o"],
        }
    ]  # fmt: skip
    assert (outcome.stage, outcome.return_code, outcome.stderr, outcome.ok) == ("compile", 1, "no", False)


def test_responses_become_outcomes(url: str) -> None:
    client = FusionSandbox(SandboxConfig(url=url))
    Scripted.responses = [
        response("Failed", ran=stage(3, stdout="x\n"), files={"o": "AP8="}),
        response("Failed", ran=stage(None, "TimeLimitExceeded")),
        response("SandboxError", message="language lean is unknown"),
    ]
    ran, late = client.run(Program("")), client.run(Program(""))
    assert (ran.why, ran.return_code, ran.stdout, ran.files) == ("exit", 3, "x\n", {"o": b"\0\xff"})
    assert (late.why, late.return_code) == ("timeout", 137)
    with pytest.raises(SandboxError, match="could not run it: language lean is unknown"):
        client.run(Program(""))


def test_check_runs_an_empty_program(url: str) -> None:
    Scripted.responses = [response("Success", ran=stage(0)), response("Failed", ran=stage(1, stderr="broken"))]
    check_sandbox(SandboxConfig(url=url))
    with pytest.raises(ConfigError, match="an empty Python program failed there: broken"):
        check_sandbox(SandboxConfig(url=url))


def test_only_a_gateway_timeout_is_retried(url: str) -> None:
    client = FusionSandbox(SandboxConfig(url=url), retry_seconds=0.001)
    Scripted.responses = [(504, b""), (504, b""), COMPILE_FAILED]
    assert client.run(Program("")).stderr == "no"
    Scripted.responses = [(504, b"late")] * 3
    with pytest.raises(SandboxError, match="answers 504: late"):
        client.run(Program(""))
    Scripted.responses = [(500, b"broken"), (200, b"{}")]
    with pytest.raises(SandboxError, match="answers 500: broken"):
        client.run(Program(""))
    assert len(Scripted.responses) == 1


def test_malformed_response_raises_an_error(url: str) -> None:
    bodies = (
        *(b"", b"{", b"[]", b"{}", b'{"status": "Success"}', b'{"status": "Failed", "run_result": 3}', b"[" * 100_000),
        b'{"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": [[]]}}',
        b'{"status": "Success", "run_result": {"status": "Finished", "return_code": 0}, "files": {"x": [1]}}',
    )
    for body in bodies:
        Scripted.responses = [(200, body)]
        with pytest.raises(
            SandboxError, match=r"sandbox\.url=.* (sent a response in an unknown format|cannot be used)"
        ):
            FusionSandbox(SandboxConfig(url=url)).run(Program(""))


def test_response_beyond_its_size_limit_raises_an_error(url: str) -> None:
    Scripted.responses = [(200, b" " * (16 << 20))]
    with pytest.raises(SandboxError, match=r"more than the \d+ bytes that sandbox\.output_kib"):
        FusionSandbox(SandboxConfig(url=url, tmp_mib=1)).run(Program(""))
