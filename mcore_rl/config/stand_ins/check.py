"""Static check of users' files for names of verl that the stand-in modules do not provide."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mcore_rl.config.stand_ins.modules import MODULES, REMEDY, stands_in
from mcore_rl.errors import ConfigError

_IMPORT_ERRORS = frozenset(["ImportError", "ModuleNotFoundError"])


class _Use(NamedTuple):
    line: int
    module: str
    name: str

    @property
    def missing(self) -> bool:
        # Every module has names such as __file__.
        if f"{self.module}.{self.name}" in MODULES or self.name.startswith("__"):
            return False
        return self.name not in MODULES.get(self.module, {})


def check_verl_names(origin: str, path: Path) -> None:
    """Check that every name of verl in a file is provided, also inside functions and `try: ... except Exception`.

    Imports in `try: ... except ImportError`, or in a `try` at module level that contains only imports and assignments,
    are optional and not checked.

    Raises: ConfigError that begins with `origin` and names file, line, name and remedy.
    """
    if not stands_in():
        return
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    # ValueError: NUL bytes; RecursionError: nested too deeply.
    except (OSError, SyntaxError, ValueError, RecursionError):
        return  # the import reports the error
    missing = next((use for use in sorted(_uses(tree)) if use.missing), None)
    if missing is not None:
        raise ConfigError(
            f"{origin}: {path}:{missing.line} uses {missing.module}.{missing.name}, which mcore-rl does not provide, "
            f"and verl is not installed; {REMEDY}"
        )


def _uses(tree: ast.Module) -> Iterator[_Use]:
    modules: dict[str, str] = {}
    for node in _required(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and _of_verl(node.module or ""):
            yield from _used_by_from(node, modules)
        elif isinstance(node, ast.Import):
            yield from _used_by_import(node, modules)
    # A name that also refers to something else cannot be checked without running the file.
    for name in _bound_elsewhere(tree):
        modules.pop(name, None)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (module := _module_of(node.value, modules)) is not None:
            yield _Use(node.lineno, module, node.attr)


def _used_by_from(node: ast.ImportFrom, modules: dict[str, str]) -> Iterator[_Use]:
    source = node.module or ""
    for alias in node.names:
        if f"{source}.{alias.name}" in MODULES:
            modules[alias.asname or alias.name] = f"{source}.{alias.name}"
        # A star import binds only names that exist, so none can be missing.
        elif alias.name != "*" or source not in MODULES:
            yield _Use(node.lineno, source, alias.name)


def _used_by_import(node: ast.Import, modules: dict[str, str]) -> Iterator[_Use]:
    for alias in node.names:
        if not _of_verl(alias.name):
            continue
        source, _, name = alias.name.rpartition(".")
        if source:
            yield _Use(node.lineno, source, name)
        # `import verl.utils` binds the name verl.
        modules |= {alias.asname: alias.name} if alias.asname else {"verl": "verl"}


def _bound_elsewhere(tree: ast.Module) -> Iterator[str]:
    """Yield names that a file also binds to something else: `import math` in addition to verl's math."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not _of_verl(node.module or "")):
            names = (alias for alias in node.names if not _of_verl(alias.name))
            yield from (alias.asname or alias.name.partition(".")[0] for alias in names)


def _module_of(node: ast.expr, modules: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return modules.get(node.id)
    if isinstance(node, ast.Attribute):
        parent = _module_of(node.value, modules)
        return f"{parent}.{node.attr}" if parent is not None and f"{parent}.{node.attr}" in MODULES else None
    return None


def _of_verl(module: str) -> bool:
    return module.partition(".")[0] == "verl"


def _required(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a tree in order, without optional imports and imports for type checkers."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Try) and _is_optional(child, top_level=isinstance(node, ast.Module)):
            continue
        yield from _required(child)


def _is_optional(node: ast.Try, *, top_level: bool) -> bool:
    """Return True if a file handles a failing import: it catches ImportError, or a try block at module level contains
    only imports and assignments."""
    if any(map(_catches_import_error, node.handlers)):
        return True
    return top_level and all(isinstance(each, ast.Import | ast.ImportFrom | ast.Assign) for each in node.body)


def _catches_import_error(handler: ast.ExceptHandler) -> bool:
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(isinstance(each, ast.Name) and each.id in _IMPORT_ERRORS for each in types)
