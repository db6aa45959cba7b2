"""Both ends of SandboxFusion's interface: our server asked as is documented, our client told what is answered."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import pytest

from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.errors import ConfigError, SandboxError
from mcore_rl.sandbox.check import check_sandbox
from mcore_rl.sandbox.fusion import FusionSandbox
from mcore_rl.sandbox.interface import Program
from mcore_rl.sandbox.local import LocalSandbox
from mcore_rl.sandbox.server import SandboxServer, read_config, serve
from tests.unit.sandbox.conftest import limited

OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
FIELDS = {"status", "message", "compile_result", "run_result", "executor_pod_name", "files"}


def url(server: HTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def in_background(server: HTTPServer) -> Iterator[HTTPServer]:
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def server(sandbox: LocalSandbox) -> Iterator[HTTPServer]:
    yield from in_background(serve(limited(max_running=2), "127.0.0.1", 0, queue_seconds=0.2))


def post(server: HTTPServer, request: Any, path: str = "/run_code") -> tuple[int, Any]:
    body = request if isinstance(request, bytes) else json.dumps(request).encode()
    try:
        with OPENER.open(urllib.request.Request(url(server) + path, body), timeout=60) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def test_a_program_is_answered_in_all_fields(server: HTTPServer) -> None:
    request = {
        "code": "print(input()); open('out', 'w').write(open('in').read() * 2)", "language": "python", "run_timeout": 5,
        "compile_timeout": 5, "memory_limit_MB": -1, "stdin": "hi", "fetch_files": ["out"],
        "files": {"in": base64.b64encode(b"ab").decode(), "none": None},
    }  # fmt: skip
    code, answer = post(server, request)
    assert code == 200
    assert set(answer) == FIELDS
    assert (answer["status"], answer["compile_result"]) == ("Success", None)
    run = answer["run_result"]
    assert {name: run[name] for name in ("status", "return_code", "stdout", "stderr")} == {
        "status": "Finished", "return_code": 0, "stdout": "hi\n", "stderr": ""
    }  # fmt: skip
    assert run["execution_time"] > 0
    assert {path: base64.b64decode(content) for path, content in answer["files"].items()} == {"out": b"abab"}


def test_cells_share_a_namespace_and_each_is_answered(server: HTTPServer) -> None:
    request = {
        "cells": [
            "import os, sys\nx = int(open('in').read())\nprint('a'); print('b', file=sys.stderr)",
            "x + 1",
            "os.system('echo from outside')\ny = x / 0",
            "open('out', 'w').write('made')\n'y' in globals()",
        ],
        "files": {"in": base64.b64encode(b"41").decode(), "none": None},
        "fetch_files": ["out"],
        "total_timeout": 10,
        "kernel": "python3",
    }
    code, answer = post(server, request, "/run_jupyter")
    assert code == 200
    assert set(answer) == {"status", "message", "driver", "cells", "executor_pod_name", "files"}
    assert (answer["status"], answer["driver"]["status"], answer["driver"]["return_code"]) == ("Failed", "Finished", 0)
    first, second, third, fourth = answer["cells"]
    assert first == {"stdout": "a\n", "stderr": "b\n", "display": [], "error": []}
    assert second == {"stdout": "", "stderr": "", "display": [{"text/plain": "42"}], "error": []}
    assert third["stdout"] == "from outside\n"
    assert [(each["ename"], each["evalue"]) for each in third["error"]] == [("ZeroDivisionError", "division by zero")]
    assert "<cell 3>" in "".join(third["error"][0]["traceback"])
    assert "main.py" not in "".join(third["error"][0]["traceback"])
    assert fourth["display"] == [{"text/plain": "False"}]
    assert {path: base64.b64decode(content) for path, content in answer["files"].items()} == {"out": b"made"}
    assert post(server, {"cells": ["x"]}, "/run_jupyter")[1]["cells"][0]["error"][0]["ename"] == "NameError"


def test_cells_have_limits_of_their_own_and_together(server: HTTPServer) -> None:
    loops = {"cells": ["1", "while True: pass", "2"], "cell_timeout": 0.3}
    code, answer = post(server, loops, "/run_jupyter")
    assert (code, answer["status"], len(answer["cells"])) == (200, "Failed", 3)
    assert answer["cells"][1]["error"][0]["ename"] == "CellTimeout"
    code, answer = post(server, loops | {"cell_timeout": 0, "total_timeout": 1}, "/run_jupyter")
    assert (answer["status"], answer["driver"]["status"]) == ("Failed", "TimeLimitExceeded")
    assert [cell["display"] for cell in answer["cells"]] == [[{"text/plain": "1"}]]  # those that had ended
    code, answer = post(server, {"cells": ["import os; os._exit(3)"]}, "/run_jupyter")
    assert (answer["status"], answer["driver"]["return_code"], answer["cells"]) == ("Failed", 3, [])


@pytest.mark.parametrize(
    ("changes", "told"),
    [({"cells": [1]}, "field cells"), ({"kernel": "julia"}, "field kernel: julia"), ({"cells": "1"}, "field cells")],
)
def test_wrong_requests_of_cells_name_the_field(server: HTTPServer, changes: dict[str, Any], told: str) -> None:
    code, answer = post(server, {"cells": ["1"], **changes}, "/run_jupyter")
    assert code == 422
    assert told in answer["detail"]


def test_failures_have_their_status(server: HTTPServer) -> None:
    code, answer = post(server, {"code": "import time; time.sleep(9)", "language": "python", "run_timeout": 0.3})
    assert (code, answer["status"], answer["run_result"]["status"]) == (200, "Failed", "TimeLimitExceeded")
    code, answer = post(server, {"code": "1 / 0", "language": "python"})
    assert (code, answer["status"], answer["run_result"]["return_code"]) == (200, "Failed", 1)
    assert "ZeroDivisionError" in answer["run_result"]["stderr"]
    code, answer = post(server, {"code": "", "language": "verilog"})
    assert (code, answer["status"], answer["run_result"]) == (200, "SandboxError", None)
    assert "language verilog is not known here" in answer["message"]


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        ({"language": "python"}, 422, "field code is missing"),
        ({"code": 3, "language": "python"}, 422, "field code has the wrong type"),
        ({"code": "", "language": "python", "run_timeout": "x"}, 422, "field run_timeout has the wrong type"),
        ({"code": "", "language": "python", "files": {"a": "*"}}, 422, "field files: a is not in base64"),
        (b"{", 422, "the request is no JSON object"),
        (b"[1]", 422, "the request is no JSON object"),
    ],
)
def test_bad_requests_name_the_field(server: HTTPServer, request_: Any, code: int, words: str) -> None:
    answered, answer = post(server, request_)
    assert answered == code
    assert words in answer["detail"]


def test_ping_and_paths_that_are_not_served(server: HTTPServer) -> None:
    with OPENER.open(url(server) + "/v1/ping", timeout=10) as response:
        assert json.loads(response.read()) == "pong"
    assert post(server, {}, "/submit")[0] == 404


def test_our_client_understands_our_server(server: HTTPServer) -> None:
    client = FusionSandbox(SandboxConfig(url=url(server) + "/"))
    ran = client.run(Program("import sys\nprint(sys.stdin.read())\nsys.exit(3)", stdin="x"))
    assert (ran.why, ran.return_code, ran.stdout, ran.compilation) == ("exit", 3, "x\n", None)
    late = client.run(Program("import time\ntime.sleep(9)", seconds=0.3))
    assert (late.why, late.return_code) == ("timeout", 137)
    fetched = client.run(Program("open('o', 'wb').write(open('i', 'rb').read())", files={"i": b"\0\xff"}, fetch=("o",)))
    assert fetched.files == {"o": b"\0\xff"}
    with pytest.raises(SandboxError, match="could not run it: language lean is not known"):
        client.run(Program("", language="lean"))
    check_sandbox(SandboxConfig(url=url(server)))


def test_a_full_server_says_come_again(server: HTTPServer) -> None:
    assert isinstance(server, SandboxServer)
    server.turns.acquire()
    server.turns.acquire()
    try:
        assert post(server, {"code": "", "language": "python"})[0] == 504
    finally:
        server.turns.release(2)


class Scripted(BaseHTTPRequestHandler):
    """Answers what the test has put there, as the server of another project would."""

    answers: ClassVar[list[tuple[int, bytes]]] = []
    requests: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        self.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        code, body = self.answers.pop(0)
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def scripted() -> Iterator[HTTPServer]:
    Scripted.answers, Scripted.requests = [], []
    yield from in_background(HTTPServer(("127.0.0.1", 0), Scripted))


COMPILE_FAILED = {
    "status": "Failed", "message": "", "executor_pod_name": "pod", "files": {}, "run_result": None,
    "compile_result": {"status": "Finished", "execution_time": 0.5, "return_code": 1, "stdout": "", "stderr": "no"},
}  # fmt: skip


def test_the_request_has_the_servers_fields(scripted: HTTPServer) -> None:
    Scripted.answers = [(200, json.dumps(COMPILE_FAILED).encode())]
    program = Program(
        "c", "cpp", stdin="s", files={"f": b"x"}, fetch=("o",), seconds=2, compile_seconds=3, memory_mib=100
    )
    outcome = FusionSandbox(SandboxConfig(url=url(scripted))).run(program)
    assert Scripted.requests == [
        {
            "code": "c", "language": "cpp", "compile_timeout": 3, "run_timeout": 2, "memory_limit_MB": 100,
            "stdin": "s", "files": {"f": "eA=="}, "fetch_files": ["o"],
        }
    ]  # fmt: skip
    assert (outcome.stage, outcome.return_code, outcome.stderr, outcome.ok) == ("compile", 1, "no", False)


def test_a_gateway_timeout_alone_is_asked_again(scripted: HTTPServer) -> None:
    client = FusionSandbox(SandboxConfig(url=url(scripted)), retry_seconds=0.001)
    Scripted.answers = [(504, b""), (504, b""), (200, json.dumps(COMPILE_FAILED).encode())]
    assert client.run(Program("")).stderr == "no"
    Scripted.answers = [(504, b"late")] * 3
    with pytest.raises(SandboxError, match="answers 504: late"):
        client.run(Program(""))
    Scripted.answers = [(500, b"broken"), (200, b"{}")]
    with pytest.raises(SandboxError, match="answers 500: broken"):
        client.run(Program(""))
    assert len(Scripted.answers) == 1


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"{}", b'{"status": "Success"}', b'{"status": "Failed", "run_result": 3}', b"[" * 100_000),
        b'{"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": [[]]}}',
        b'{"status": "Success", "run_result": {"status": "Finished", "return_code": 0}, "files": {"x": [1]}}',
    ],
)
def test_an_answer_of_another_form_is_an_error(scripted: HTTPServer, body: bytes) -> None:
    Scripted.answers = [(200, body)]
    with pytest.raises(SandboxError, match=r"sandbox\.url=.* (answers in another form|cannot be asked)"):
        FusionSandbox(SandboxConfig(url=url(scripted))).run(Program(""))


def test_fusion_answer_beyond_its_limits_is_an_error(scripted: HTTPServer) -> None:
    Scripted.answers = [(200, b" " * (16 << 20))]
    with pytest.raises(SandboxError, match=r"more than the \d+ bytes that sandbox\.output_kib"):
        FusionSandbox(SandboxConfig(url=url(scripted), tmp_mib=1)).run(Program(""))


def test_forged_cells_of_any_shape_are_dropped_or_text(server: HTTPServer) -> None:
    deep = "[" * 900 + "]" * 900
    lines = [
        '{"stdout": "a", "stderr": "", "display": ' + deep + ', "error": []}',
        '{"stdout": "b", "stderr": "", "display": [], "error": [' + deep + "]}",
        '{"stdout": ' + "[" * 50_000 + "}",
        '{"stdout": "c", "stderr": 1e999, "display": [{"x": ' + deep + '}], "error": []}',
    ]
    writes = "    try: os.write(fd, line.encode() + b'\\n')\n    except OSError: pass"
    cell = f"import os\nfor line in {lines!r}:\n  for fd in range(3, 9):\n{writes}"
    code, answer = post(server, {"cells": [cell]}, "/run_jupyter")
    assert code == 200
    assert all(
        isinstance(text, str) for found in answer["cells"] for shown in found["display"] for text in shown.values()
    )
    assert {found["stdout"] for found in answer["cells"]} <= {"", "c"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_stopped(sandbox: LocalSandbox, number: int) -> None:
    """Also where it was started with SIGINT ignored."""
    command = [
        "env",
        "--ignore-signal=INT",
        sys.executable,
        "-m",
        "mcore_rl.sandbox.server",
        "--port",
        "0",
        "sandbox.seconds=5",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[1]
        assert address.startswith("http://127.0.0.1:")
        assert FusionSandbox(SandboxConfig(url=address)).run(Program("print(1)")).stdout == "1\n"
        time.sleep(0.1)
        process.send_signal(number)
        try:
            assert process.wait(20) == 128 + number
        finally:
            process.kill()


def test_keys_of_the_command_line_are_checked() -> None:
    assert read_config(["sandbox.seconds=3", "sandbox.max_running=2"]).seconds == 3.0
    for word, message in (
        ("seconds=3", "write sandbox.KEY=VALUE"),
        ("sandbox.second=3", "sandbox.second"),
        ("sandbox.seconds=0", "sandbox.seconds=0.0 must be above 0"),
        ("sandbox.processes=many", "sandbox.processes"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_config([word])
