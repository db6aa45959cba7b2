"""Decision which names in the tests refer to the program's objects. Runs inside the sandbox.

A program must not replace objects that its tests use. Built-in functions, modules, and the prompt's helpers therefore
stay the tests' objects, even if the program defines the same names.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from mcore_rl.rewards.graders.programs.prelude import SOLUTION

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class NameOwners:
    """Names in the tests, the prompt, and the program. request: the tester's request (_request in graders/code.py)."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._entry = _root(request.get("entry_point"))
        self._examines_classes = bool(self._entry or request["collect"])
        self._tree = ast.parse("\n".join(map(str, request["statements"])))
        self.context = ast.parse(request["prompt"])
        """The prompt without the functions that the program must implement."""
        self.context.body = [node for node in self.context.body if not self._is_stub(node)]
        self._program = set(_bound(_parsed(request["program"])))
        self._own = set(_bound(self._tree)) | set(_bound(self.context))

    @property
    def records(self) -> list[str]:
        """Classes of the prompt. The processes of tests and program exchange objects of these classes by value."""
        return [node.name for node in self.context.body if isinstance(node, ast.ClassDef)]

    @property
    def modules(self) -> list[str]:
        """Module names under which the tests import the program."""
        froms = {node.module for node in ast.walk(self._tree) if isinstance(node, ast.ImportFrom) and node.module}
        return sorted({SOLUTION, *(name for name in froms if name in ("main", "your_module", "answer"))})

    @property
    def missing_modules(self) -> list[str]:
        """Modules that the tests or the prompt import but that are not installed in this Python."""
        imported = {name for tree in (self._tree, self.context) for name in _imported_modules(tree)}
        return sorted(name for name in imported - {*self.modules} if importlib.util.find_spec(name) is None)

    def of_program(self, space: Collection[str], comparing: Collection[str], starred: Collection[str]) -> list[str]:
        """Return the names that the program may provide.

        space: names in the tests' module. starred: the prelude's names, which the program may provide only if it
        defines them. comparing: the subset of `starred` that the tests keep.
        """
        ambient = {*dir(builtins), *space, *comparing} - self._own
        named = set(self._imported()) | ({self._entry} if self._entry else self._ambient_subject(ambient))
        wanted = (self._read - self._own - ambient) | named
        return sorted(name for name in wanted if name not in starred or name in self._program)

    def of_tests(self, space: Collection[str], comparing: Collection[str]) -> set[str]:
        """Return the names of `comparing` that the tests use and `space` lacks, except the function under test."""
        subject = {self._entry} if self._entry else self._common_calls()
        known = {*dir(builtins), *space, *comparing}
        return (self._read & set(comparing)) - set(space) - (subject if subject <= known else {self._entry})

    @property
    def _read(self) -> set[str]:
        return {node.id for node in ast.walk(self._tree) if isinstance(node, ast.Name)}

    def is_trusted(self, name: str) -> bool:
        """Return whether the tests examine this class itself; its operators may then receive the tests' objects."""
        if name == self._entry or not name[:1].isupper():
            return False
        return self._examines_classes or name in _object_makers(self._tree)

    def _ambient_subject(self, ambient: set[str]) -> set[str]:
        """Return the function under test if it has the name of a built-in function, as in MBPP's
        `assert sum(10, 15) == 6`."""
        common = self._common_calls()
        return common & self._program if common <= ambient else set()

    def _common_calls(self) -> set[str]:
        """Return the names of the functions that all assertions call."""
        asserts = [node for node in self._tree.body if isinstance(node, ast.Assert)]
        called = [{name for node in ast.walk(each) for name in _called_name(node)} for each in asserts]
        return set.intersection(*called) if called else set()

    def _imported(self) -> Iterator[str]:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.ImportFrom) and node.module in self.modules:
                yield from (alias.name for alias in node.names if alias.name != "*")

    def _is_stub(self, node: ast.stmt) -> bool:
        """Return whether the program must implement this definition: the entry point, or a definition without code."""
        if not isinstance(node, _DEFINITIONS):
            return False
        if node.name == self._entry:
            return True
        return all(_is_empty(each) for part in node.body for each in getattr(part, "body", [part]))


def _root(entry_point: object) -> str | None:
    """Return the first name of an expression such as Solution().twoSum."""
    if not entry_point:
        return None
    names = [node for node in ast.walk(ast.parse(str(entry_point), mode="eval")) if isinstance(node, ast.Name)]
    return names[0].id if names else None


def _parsed(program: str) -> ast.Module:
    try:
        return ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module(body=[], type_ignores=[])


def _bound(tree: ast.Module) -> Iterator[str]:
    """Yield the names that the top level of a module binds."""
    for node in tree.body:
        if isinstance(node, _DEFINITIONS):
            yield node.name
            continue
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and not isinstance(inner.ctx, ast.Load):
                yield inner.id
            elif isinstance(inner, ast.alias):
                yield (inner.asname or inner.name).partition(".")[0]


def _imported_modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _object_makers(tree: ast.AST) -> Iterator[str]:
    """Yield names whose call results are assigned or have an attribute read: `root = Node(1)`, `Solution().f`."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.Attribute)):
            yield from _called_name(node.value)


def _called_name(node: ast.AST) -> list[str]:
    """Return the name of a called function; empty for any other node."""
    return [node.func.id] if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else []


def _is_empty(statement: ast.AST) -> bool:
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    return isinstance(statement, (ast.Pass, ast.Raise))
