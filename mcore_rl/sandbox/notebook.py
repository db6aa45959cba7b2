"""What runs the cells of one request inside a sandbox: in one namespace, each with what it printed and raised.

Its text is handed to the sandbox's own Python, of whatever version, beside a file of cells; a JSON line for each cell
goes to standard output as soon as it has ended. Nothing that it says is trusted: a cell can forge it, for its own
request.
"""

from __future__ import annotations

import ast
import json
import linecache
import os
import signal
import sys
import tempfile
import traceback
import types
from typing import Any

CELLS = ".mcore_rl_cells.json"


class CellTimeout(BaseException):
    """Raised within the cell that took too long."""


def out_of_time(*_: Any) -> None:
    raise CellTimeout("the cell took longer than cell_timeout")


def evaluated(code: str, name: str, namespace: dict[str, Any]) -> list[dict[str, str]]:
    """What the cell shows: the value of a last expression."""
    linecache.cache[name] = (len(code), None, code.splitlines(True), name)
    tree = ast.parse(code, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), namespace)
    if not isinstance(last, ast.Expr):
        return []
    value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
    namespace["_"] = value
    return [] if value is None else [{"text/plain": repr(value)}]


def run_cell(code: str, name: str, namespace: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The cell's display and errors."""
    display: list[dict[str, str]] = []
    errors: list[dict[str, Any]] = []
    signal.signal(signal.SIGALRM, out_of_time)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        display = evaluated(code, name, namespace)
    except BaseException as error:  # whatever the cell raises, SystemExit too, is its result
        inner = error.__traceback__
        while inner is not None and inner.tb_frame.f_code.co_filename == __file__:
            inner = inner.tb_next
        lines = traceback.format_exception(type(error), error, inner)
        errors = [{"ename": type(error).__name__, "evalue": str(error), "traceback": lines}]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return {"display": display, "error": errors}


def main() -> None:
    with open(CELLS) as asked:
        request = json.load(asked)
    os.remove(CELLS)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    module = types.ModuleType("__main__")
    sys.argv, sys.modules["__main__"] = [""], module
    pid = os.getpid()
    for number, code in enumerate(request["cells"], 1):
        captured = {name: tempfile.TemporaryFile() for name in ("stdout", "stderr")}  # noqa: SIM115
        for descriptor, file in enumerate(captured.values(), 1):
            os.dup2(file.fileno(), descriptor)  # of programs that the cell starts, too
        result = run_cell(code, f"<cell {number}>", module.__dict__, request["cell_timeout"])
        if os.getpid() != pid:  # a cell has forked, and this is the child
            os._exit(0)
        for name, file in captured.items():
            file.seek(0)
            result[name] = file.read().decode("utf-8", "replace")
            file.close()
        answers.write(json.dumps(result) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
