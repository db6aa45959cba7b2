"""Programs, their files, and many of them at once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from mcore_rl.errors import SandboxError
from mcore_rl.sandbox.interface import Program
from mcore_rl.sandbox.local import LocalSandbox, find_language
from tests.unit.sandbox.conftest import limited


def test_run_separates_stdout_stderr_and_return_code(sandbox: LocalSandbox) -> None:
    outcome = sandbox.run(Program("import sys\nprint(input()[::-1])\nsys.exit('no ü')", stdin="äbc\n"))
    assert (outcome.why, outcome.return_code, outcome.ok) == ("exit", 1, False)
    assert (outcome.stdout, outcome.stderr) == ("cbä\n", "no ü\n")


def test_run_ended_by_signal_has_return_code_128_plus_n(sandbox: LocalSandbox) -> None:
    assert sandbox.run(Program("import os\nos.kill(os.getpid(), 11)")).return_code == 128 + 11


def test_run_streams_input_larger_than_a_pipe(sandbox: LocalSandbox) -> None:
    text = "0123456789abcde\n" * 3000
    outcome = sandbox.run(Program("import sys\nfor line in sys.stdin: print(line, end='')", stdin=text))
    assert outcome.stdout == text
    assert sandbox.run(Program("print('does not read')", stdin="x" * (1 << 20))).stdout == "does not read\n"


def test_files_are_written_and_fetched(sandbox: LocalSandbox) -> None:
    code = "import helper, os\nopen('out/b.bin', 'wb').write(helper.data + open('d/in', 'rb').read())"
    files = {"helper.py": b"data = bytes(range(256))", "d/in": b"\xff\0", "out/x": b""}
    outcome = sandbox.run(Program(code, files=files, fetch=("./out/b.bin",)))
    assert outcome.ok, outcome.stderr
    assert outcome.files == {"./out/b.bin": bytes(range(256)) + b"\xff\0"}


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", ""])
def test_paths_outside_working_directory_are_rejected(sandbox: LocalSandbox, path: str) -> None:
    with pytest.raises(SandboxError, match="inside the working directory"):
        sandbox.run(Program("", files={path: b""}))
    with pytest.raises(SandboxError, match="inside the working directory"):
        sandbox.run(Program("", fetch=(path,)))


def test_files_over_the_limit_raise_sandbox_error(sandbox: LocalSandbox) -> None:
    with pytest.raises(SandboxError, match=r"did not start: .*File size limit exceeded"):
        sandbox.run(Program("", files={"large": bytes(30 << 20)}))


def test_forged_output_stream_returns_no_files(sandbox: LocalSandbox) -> None:
    code = "import os, signal\nfor n in range(3, 60):\n  try: os.write(n, b'forged')\n  except OSError: pass"
    assert sandbox.run(Program(code, fetch=("x",))).files == {}


def test_compiled_language_reports_compile_and_run(sandbox: LocalSandbox) -> None:
    try:
        find_language("cpp")
    except SandboxError as error:
        pytest.skip(str(error))
    sandbox = LocalSandbox(limited(memory_mib=512))
    ran = sandbox.run(Program('#include <cstdio>\nint main() { puts("hi"); return 3; }', language="cpp"))
    assert (ran.stage, ran.stdout, ran.return_code) == ("run", "hi\n", 3)
    refused = sandbox.run(Program("int main() { return x; }", language="cpp"))
    assert (refused.stage, refused.return_code) == ("compile", 1)
    assert "not declared" in refused.stderr


def test_bash_runs_and_unknown_language_is_named(sandbox: LocalSandbox) -> None:
    assert sandbox.run(Program("echo $((6 * 7)); exit 4", language="bash")).return_code == 4
    with pytest.raises(SandboxError, match="language cobol is not known here, only bash, cpp"):
        sandbox.run(Program("", language="cobol"))


def test_max_running_limits_concurrency() -> None:
    sandbox = LocalSandbox(limited(max_running=1))
    code = "import time\nprint(time.time())\ntime.sleep(0.2)\nprint(time.time())"
    with ThreadPoolExecutor(3) as pool:
        spans = [list(map(float, o.stdout.split())) for o in pool.map(sandbox.run, [Program(code)] * 3)]
    ordered = [moment for span in sorted(spans) for moment in span]
    assert ordered == sorted(ordered)


def test_sandboxes_die_with_their_parent() -> None:
    code = (
        "import sys, threading\nfrom mcore_rl.config.sandbox import SandboxConfig\n"
        "from mcore_rl.sandbox.local import LocalSandbox\n"
        "i = LocalSandbox(SandboxConfig(kind=sys.argv[1])).interpreter()\ni.cell('import os\\n"
        "if os.fork() == 0: os.setsid()')\n"
        "print('up', flush=True)\nthreading.Event().wait()"
    )
    for kind in ("bubblewrap", "landlock"):
        process = subprocess.Popen([sys.executable, "-c", code, kind], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        inside = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        process.stdout.close()
        assert len(inside) >= 2
        assert psutil.wait_procs(inside, timeout=60)[1] == []


def test_interpreter_outlives_the_thread_that_opened_it(sandbox: LocalSandbox) -> None:
    opened = []
    thread = threading.Thread(target=lambda: opened.append(sandbox.interpreter()))
    thread.start()
    thread.join()
    time.sleep(0.05)
    with opened[0] as interpreter:
        assert interpreter.cell("1 + 1").output == "2\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mask files of /proc")
def test_masked_proc_is_not_mounted(tmp_path: Path) -> None:
    code = (
        "from mcore_rl.config.sandbox import SandboxConfig\nfrom mcore_rl.sandbox.local import LocalSandbox\n"
        "from mcore_rl.sandbox.interface import Program\n"
        "print(LocalSandbox(SandboxConfig()).run(Program('import os; print(os.path.exists(\"/proc/self\"))')))"
    )
    mask = 'mount --bind /dev/null /proc/keys && exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mask, sys.executable, code], capture_output=True, text=True, check=False
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(done.stderr)
    assert "return_code=0, stdout='False" in done.stdout, done.stdout + done.stderr
