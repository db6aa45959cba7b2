"""Interpreters and shells of an episode."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from mcore_rl.sandbox.interpreter import Interpreter, Shell
from mcore_rl.sandbox.local import LocalSandbox
from tests.unit.sandbox.conftest import limited
from tests.unit.sandbox.test_escapes import MANY


@pytest.fixture
def interpreter(sandbox: LocalSandbox) -> Iterator[Interpreter]:
    with sandbox.interpreter() as interpreter:
        yield interpreter


@pytest.fixture
def shell(sandbox: LocalSandbox) -> Iterator[Shell]:
    shell = sandbox.shell()
    yield shell
    shell.close()


def test_cells_share_state_and_print_last_value(interpreter: Interpreter) -> None:
    assert interpreter.cell("import math\ndef f(x): return math.comb(x, 2)").output == ""
    assert interpreter.cell("print('a')\nf(5)").output == "a\n10\n"
    assert interpreter.cell("_ + 1; None").output == ""
    assert (
        interpreter.cell("import pickle\nclass K: pass\ntype(pickle.loads(pickle.dumps(K()))) is K").output == "True\n"
    )


def test_cell_error_is_output_and_keeps_state(interpreter: Interpreter) -> None:
    interpreter.cell("x = 3")
    outcome = interpreter.cell("y = 4\nx / 0")
    assert (outcome.ok, outcome.why) == (False, "exit")
    assert outcome.output.splitlines()[:3] == [
        "Traceback (most recent call last):",
        '  File "<cell 2>", line 2, in <module>',
        "    x / 0",
    ]
    assert "ZeroDivisionError" in outcome.output
    assert "SyntaxError" in interpreter.cell("1 +").output
    assert not interpreter.cell("raise SystemExit(0)").ok
    assert interpreter.cell("x + y").output == "7\n"


def test_output_of_child_processes_is_in_order(interpreter: Interpreter) -> None:
    code = (
        "import subprocess, sys\nprint('a')\nsubprocess.run(['echo', 'b'])\nprint('c', file=sys.stderr)\n"
        "subprocess.run('echo d >&2', shell=True)"
    )
    assert interpreter.cell(code).output.startswith("a\nb\nc\nd\n")
    assert interpreter.cell("input()").output.strip().endswith("EOFError: EOF when reading a line")


def test_cell_over_output_limit_ends_and_keeps_state(interpreter: Interpreter) -> None:
    outcome = interpreter.cell("x = 1\nwhile True: print('y' * 100)")
    assert (outcome.ok, outcome.why, len(outcome.output)) == (False, "output", 64 << 10)
    assert interpreter.cell("x").output == "1\n"


def test_output_outside_python_over_limit_ends_interpreter(interpreter: Interpreter) -> None:
    outcome = interpreter.cell("import os\nwhile True: os.write(1, b'y' * 4096)")
    assert (outcome.ok, outcome.why, len(outcome.output)) == (False, "output", 64 << 10)
    after = interpreter.cell("1")
    assert (after.why, after.output) == (
        "gone",
        "the interpreter was ended: a cell wrote more than 65536 bytes; what it held is lost",
    )


def test_interpreter_after_timeout_is_gone(interpreter: Interpreter) -> None:
    outcome = interpreter.cell(
        "import time\nprint('begun')\ntry: time.sleep(99)\nexcept BaseException: pass", seconds=0.3
    )
    assert (outcome.output, outcome.ok, outcome.why) == ("begun\n", False, "timeout")
    assert not interpreter.alive
    after = interpreter.cell("1")
    assert (after.ok, after.why) == (False, "gone")
    assert after.output == "the interpreter was ended: a cell took longer than 0.3 seconds; what it held is lost"


def test_interpreter_that_exits_is_gone(interpreter: Interpreter) -> None:
    assert interpreter.cell("import os\nprint('bye')\nos._exit(0)").why == "gone"
    assert interpreter.cell("1").output == "the interpreter has ended by itself; what it held is lost"


def test_interpreter_total_memory_is_limited(interpreter: Interpreter) -> None:
    assert interpreter.cell(MANY).why == "memory"


def test_forked_child_returning_from_cell_sends_nothing(interpreter: Interpreter) -> None:
    assert interpreter.cell("import os\npid = os.fork()").ok
    assert interpreter.cell("pid > 0").output == "True\n"
    assert interpreter.cell("os.waitpid(pid, 0)[1]").output == "0\n"


def test_forged_result_affects_only_its_episode(sandbox: LocalSandbox, interpreter: Interpreter) -> None:
    for line in ("{", "[1]", '{"ok": 7}', "\\xff", '{"ok": true, "why": []}', "[" * 4000):
        code = (
            f"import os\nfor n in range(3, 60):\n  try: os.write(n, b'{line}\\n')\n  except OSError: pass\nos._exit(0)"
        )
        with sandbox.interpreter() as forging:
            assert forging.cell(code).why in ("exit", "gone"), line
        assert interpreter.cell("1 + 1").output == "2\n", line


def test_concurrent_cells_run_one_after_another(interpreter: Interpreter) -> None:
    async def run() -> list[str]:
        interpreter.cell("n = 0")
        outcomes = await asyncio.gather(*(asyncio.to_thread(interpreter.cell, "n += 1; n\nn") for _ in range(20)))
        return [outcome.output for outcome in outcomes]

    assert sorted(map(int, asyncio.run(run()))) == list(range(1, 21))


def test_close_interrupts_a_running_cell(interpreter: Interpreter) -> None:
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.append(interpreter.cell("import time\ntime.sleep(99)")))
    thread.start()
    time.sleep(0.1)
    interpreter.close()
    thread.join()
    assert [outcome.why for outcome in outcomes] == ["gone"]
    assert interpreter.cell("1").output == "the interpreter was closed"
    interpreter.close()


def test_shell_keeps_directory_and_variables(shell: Shell) -> None:
    assert shell.cell("mkdir d && cd d && n=3; f() { echo f$1; }").ok
    outcome = shell.cell("pwd; echo $n; f x; echo err >&2")
    assert (outcome.output, outcome.ok) == ("/tmp/d\n3\nfx\nerr\n", True)
    assert not shell.cell("false").ok
    assert not shell.cell("if then").ok
    assert shell.cell('read line; echo "[$line]"').output == "[]\n"
    assert (shell.cell("sleep 99", seconds=0.2).why, shell.cell("true").why) == ("timeout", "gone")


def test_idle_interpreters_do_not_use_slots() -> None:
    sandbox = LocalSandbox(limited(max_running=1))
    with ExitStack() as stack:
        interpreters = [stack.enter_context(sandbox.interpreter()) for _ in range(3)]
        assert [each.cell(str(n)).output for n, each in enumerate(interpreters)] == ["0\n", "1\n", "2\n"]
