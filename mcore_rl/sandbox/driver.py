"""Main program of an episode's interpreter, inside the sandbox: reads one cell per line and runs all cells in one
namespace.

The sandbox's Python, which can have another version, receives this file as text. Arguments: descriptor for results,
and maximum bytes of output per cell. The host does not trust the results: a cell can forge them for its own episode.
"""

from __future__ import annotations

import ast
import io
import json
import linecache
import os
import sys
import traceback
import types
from typing import Any


class OutputLimit(BaseException):
    """Raised inside a cell whose output reaches the limit."""


class Counted(io.FileIO):
    """Standard output or error. Both count towards one limit: `left` bytes remain for the cell."""

    left = 0

    def write(self, data: Any) -> int:
        data = bytes(data)
        kept = data[: Counted.left]
        Counted.left -= len(kept)
        while kept:
            kept = kept[super().write(kept) or 0 :]
        if Counted.left == 0:
            raise OutputLimit
        return len(data)


def text_stream(descriptor: int) -> io.TextIOWrapper:
    raw: Any = Counted(descriptor, "w", closefd=False)
    return io.TextIOWrapper(raw, encoding="utf-8", errors="replace", write_through=True)


def run_cell(code: str, name: str, namespace: dict[str, Any]) -> bool:
    """Run a cell and print the value of a final expression, as notebooks do. Returns False if the cell raised."""
    linecache.cache[name] = (len(code), None, code.splitlines(True), name)
    try:
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
            if value is not None:
                namespace["_"] = value
                print(repr(value))
    except OutputLimit:
        raise
    except BaseException as error:  # every exception of the cell, including SystemExit, is part of its output
        inner = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(type(error), error, inner)
        return False
    return True


def main() -> None:
    results_descriptor, limit = int(sys.argv[1]), int(sys.argv[2])
    # Programs that a cell starts must not inherit the descriptor.
    os.set_inheritable(results_descriptor, False)
    requests = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)  # a cell that reads standard input must not read requests
    sys.stdout = sys.__stdout__ = text_stream(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = text_stream(2)  # type: ignore[misc]
    # Cells run in a new __main__, so they do not see the names of this program.
    module = types.ModuleType("__main__")
    sys.argv, sys.modules["__main__"] = [""], module
    pid = os.getpid()
    os.write(results_descriptor, b"ready\n")
    for number, line in enumerate(requests, 1):
        Counted.left = limit
        result = {"ok": False, "why": "exit"}
        try:
            result["ok"] = run_cell(json.loads(line), f"<cell {number}>", module.__dict__)
        except OutputLimit:
            result["why"] = "output"
        if os.getpid() != pid:  # the cell forked, and this is the child
            os._exit(0)
        os.write(results_descriptor, json.dumps(result).encode() + b"\n")


if __name__ == "__main__":
    main()
