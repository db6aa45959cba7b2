"""Names that programs of competition data sets use without importing them. Runs inside the sandbox.

The harnesses of APPS, TACO, LiveCodeBench, and LeetCode-style sets insert these imports before every program.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import io
import linecache
import sys
import types
from collections.abc import Sequence

RECURSION_LIMIT = 50_000
INTEGER_DIGITS = 50_000
"""Maximum digits of a printed integer: LiveCodeBench's limit; Python's default is 4,300."""
SOLUTION = "solution"
"""Module name of a program whose functions are called: its `if __name__ == "__main__":` block does not run."""
_STARRED = (
    "typing string re datetime collections heapq bisect copy math random statistics itertools functools operator io "
    "json"
).split()
_MODULES = (*_STARRED, "sys", "os", "time", "decimal", "fractions", "queue", "array", "cmath", "enum", "dataclasses")
COMPARING = ("math", "statistics", "collections", "copy", "re")
"""Modules whose functions tests apply to results, sometimes without importing them."""
_FROM_SYS = ("stdin", "stdout", "stderr", "maxsize", "setrecursionlimit", "argv", "exit")


class ListNode:
    """LeetCode's linked list."""

    def __init__(self, val: object = 0, next: ListNode | None = None) -> None:
        self.val, self.next = val, next


class TreeNode:
    """LeetCode's binary tree."""

    def __init__(self, val: object = 0, left: TreeNode | None = None, right: TreeNode | None = None) -> None:
        self.val, self.left, self.right = val, left, right


NODES: dict[str, type] = {"ListNode": ListNode, "TreeNode": TreeNode}


def starred_names(modules: Sequence[str] = _STARRED) -> dict[str, object]:
    """Return the names of `from module import *` for all modules, without names of built-in functions."""
    names = {name: getattr(sys, name) for name in _FROM_SYS} if modules == _STARRED else {}
    for name in modules:
        names.update(_public(name))
    return {name: value for name, value in names.items() if not hasattr(builtins, name)}


def module_names() -> dict[str, object]:
    """Return modules, the names of typing, and LeetCode's nodes by name."""
    return {**_public("typing"), **{name: importlib.import_module(name) for name in _MODULES}, **NODES}


def _public(name: str) -> dict[str, object]:
    module = importlib.import_module(name)
    public = getattr(module, "__all__", [each for each in vars(module) if not each.startswith("_")])
    return {each: getattr(module, each) for each in public}


def take(stream: io.StringIO) -> str:
    """Return and clear the text of a stream."""
    text = stream.getvalue()
    stream.seek(0)
    stream.truncate()
    return text


def unbound_names(source: str) -> set[str]:
    """Return the names that the source reads but does not bind.

    Raises: SyntaxError, ValueError, RecursionError.
    """
    read: set[str] = set()
    bound = set(dir(builtins))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
    return read - bound


def execute(program: str, name: str, *, context: str = "") -> types.ModuleType:
    """Run a program as module `name`; return the module. context: code to run first, such as a prompt's imports.

    Raises: any exception of the program.
    """
    module, file = types.ModuleType(name), f"{SOLUTION}.py"
    sys.modules[name], sys.argv = module, [file]
    sys.setrecursionlimit(RECURSION_LIMIT)
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(INTEGER_DIGITS)
    linecache.cache[file] = (len(program), None, program.splitlines(True), file)
    code = compile(program, file, "exec")
    # The imports take time, so they happen only if the program lacks names. A __future__ import must be the first
    # statement, so such a program is examined without the context.
    if missing := unbound_names(f"{context}\n{program}" if "__future__" not in program else program):
        ambient = {**starred_names(), **module_names()}
        module.__dict__.update({each: ambient[each] for each in missing if each in ambient})
    if context:
        exec(compile(context, "context.py", "exec"), module.__dict__)
    exec(code, module.__dict__)
    return module
