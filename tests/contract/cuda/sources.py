"""Static analysis of packages: definitions of names, and signatures of functions and classes.

Nothing is imported, because the kernels of a CUDA package are missing. Names from outside the folder (other packages,
compiled modules) and values of unknown type are accepted.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.contract.cuda.uses import Call, Use

Statement = ast.stmt
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """Parsed module.

    package: base of relative imports.
    bindings: statements that bind each name, in order, in all branches.
    stars: modules that are imported with `*`.
    """

    name: str
    package: str
    body: tuple[Statement, ...]
    bindings: dict[str, tuple[Statement, ...]]
    stars: tuple[str, ...]


@dataclass(frozen=True)
class Definition:
    """Definition of a name: a module, or statement `node` of `module`. Both are None for names outside the folder."""

    name: str
    module: Module | None = None
    node: Statement | None = None


@dataclass(frozen=True)
class Signature:
    """Arguments of a callable. `rest`: whether it accepts *args and **kwargs."""

    names: tuple[str, ...]
    by_name: frozenset[str]
    required: frozenset[str]
    rest: tuple[bool, bool] = (False, False)

    def refuses(self, call: Call) -> str | None:
        """Return why a call fails, or None."""
        if call.positional > len(self.names) and not self.rest[0]:
            return f"takes {len(self.names)} positional arguments, not {call.positional}"
        given = {*self.names[: call.positional], *call.keywords}
        unknown = sorted(set(call.keywords) - {*self.names, *self.by_name})
        if unknown and not self.rest[1]:
            return f"has no argument {', '.join(unknown)}"
        missing = sorted(self.required - given)
        return f"needs {', '.join(missing)}" if missing and not call.more else None


class Sources:
    """Packages in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.module = cache(self._read)

    def problem(self, use: Use) -> str | None:
        """Return why a use fails, or None."""
        definition = self.find(use.name)
        if definition is None:
            return "does not exist"
        signature = self.signature(definition, bound=use.bound) if use.call else None
        return signature.refuses(use.call) if signature and use.call else None

    def problems(self, uses: Iterable[Use]) -> dict[str, str]:
        """Return name -> reason of all uses that fail, with the first place of each."""
        refused: dict[str, str] = {}
        for use in uses:
            why = self.problem(use)
            if why is not None:
                refused.setdefault(use.name, f"{why} ({use.where})")
        return refused

    def find(self, name: str) -> Definition | None:
        """Resolve a dotted name. Returns None if it does not exist."""
        parts = name.split(".")
        if self.module(parts[0]) is None:
            return Definition(name)
        for cut in range(len(parts), 0, -1):
            if module := self.module(".".join(parts[:cut])):
                definition: Definition | None = Definition(module.name, module)
                for part in parts[cut:]:
                    definition = self.member(definition, part) if definition else None
                return definition
        return None

    def member(self, owner: Definition, name: str) -> Definition | None:
        """Resolve an attribute of a module, a class or a value."""
        if owner.module is None:
            return Definition(f"{owner.name}.{name}")
        if owner.node is None:
            return self._global(owner.module, name)
        if isinstance(owner.node, ast.ClassDef):
            return self._attribute(owner, name)
        # A decorated function may have any attribute.
        plain = isinstance(owner.node, Function) and not owner.node.decorator_list
        return None if plain else Definition(f"{owner.name}.{name}")

    def signature(self, definition: Definition, *, bound: bool = False) -> Signature | None:
        """Return the signature, or None if it is unknown. bound: without the first argument (self)."""
        if isinstance(definition.node, ast.ClassDef):
            initial = self._attribute(definition, "__init__")
            written = initial is not None and initial.module is not None
            return self.signature(initial, bound=True) if initial and written else self._fields(definition)
        if not isinstance(definition.node, Function):
            return None
        decorators = {ast.unparse(each) for each in definition.node.decorator_list}
        instance_is_given = (bound or "classmethod" in decorators) and "staticmethod" not in decorators
        return _of_function(definition.node, drop_first=instance_is_given)

    def attributes(self, owner: Definition) -> set[str]:
        """Return the attributes of a class, its bases in the folder and their instances, without bare annotations."""
        names: set[str] = set()
        for each in self._lineage(owner):
            if isinstance(each.node, ast.ClassDef):
                names |= {name for name, node in _members(each.node) if not _is_declaration(node)}
        return names

    def _read(self, name: str) -> Module | None:
        path = self.folder.joinpath(*name.split("."))
        file, package = path / "__init__.py", name
        if not file.is_file():
            file, package = Path(f"{path}.py"), name.rpartition(".")[0]
        if not file.is_file():
            return None
        body = tuple(ast.parse(file.read_text(encoding="utf-8")).body)
        bindings: dict[str, tuple[Statement, ...]] = {}
        stars = []
        for statement in _statements(body):
            if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
                stars.append(origin(statement, package))
            for bound in _bound(statement):
                bindings[bound] = (*bindings.get(bound, ()), statement)
        return Module(name, package, body, bindings, tuple(stars))

    def _global(self, module: Module, name: str) -> Definition | None:
        # `try: from a import b` takes precedence over `except ImportError: b = None`.
        ranked = sorted(module.bindings.get(name, ()), key=_rank)
        for statement in ranked:
            definition = self._bound_by(statement, module, name)
            if definition is not None:
                return definition
        for star in module.stars:
            definition = self.find(f"{star}.{name}")
            if definition is not None and self.module(star.split(".")[0]) is not None:
                return definition
        submodule = self.module(f"{module.name}.{name}")
        return Definition(submodule.name, submodule) if submodule else None

    def _bound_by(self, statement: Statement, module: Module, name: str) -> Definition | None:
        if isinstance(statement, ast.ImportFrom):
            original = next(each.name for each in statement.names if (each.asname or each.name) == name)
            source = origin(statement, module.package)
            if self.module(source) is None:
                return Definition(f"{source}.{original}")
            return None if f"{source}.{original}" == f"{module.name}.{name}" else self.find(f"{source}.{original}")
        if isinstance(statement, ast.Import):
            renamed = {each.asname: each.name for each in statement.names}
            return self.find(renamed.get(name, name))
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name | ast.Attribute):
            first, *rest = ast.unparse(statement.value).split(".")
            if first in module.bindings and first != name:
                definition = self._global(module, first)
                for part in rest:
                    definition = self.member(definition, part) if definition else None
                return definition or Definition(f"{module.name}.{name}")
        return Definition(f"{module.name}.{name}", module, statement)

    def _attribute(self, owner: Definition, name: str) -> Definition | None:
        for each in self._lineage(owner):
            if isinstance(each.node, ast.ClassDef):
                nodes = [node for bound, node in _members(each.node) if bound == name]
                if nodes:  # the last one is not an @overload
                    return Definition(f"{each.name}.{name}", each.module, nodes[-1])
            elif _has_outside(each.name, name):
                return Definition(f"{each.name}.{name}")
        return None

    def _lineage(self, owner: Definition) -> Iterator[Definition]:
        """Yield the class and its bases, nearest first, and finally `object`."""
        yield from self._bases(owner, set())
        yield Definition("builtins.object")

    def _bases(self, owner: Definition, seen: set[str]) -> Iterator[Definition]:
        if owner.name in seen:
            return
        seen.add(owner.name)
        yield owner
        if not isinstance(owner.node, ast.ClassDef) or owner.module is None:
            return
        for base in owner.node.bases:
            written = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
            definition = self.find(f"{owner.module.name}.{written}") or Definition(f"builtins.{written}")
            yield from self._bases(definition, seen)

    def _fields(self, owner: Definition) -> Signature | None:
        """Return the signature of the generated __init__ of a dataclass or a msgspec struct, else None."""
        names: dict[str, bool] = {}
        lineage = list(self._lineage(owner))
        is_struct = any(each.name == "msgspec.Struct" for each in lineage)
        if not is_struct and not _is_dataclass(owner.node):
            return None
        for each in reversed(lineage):
            for statement in each.node.body if isinstance(each.node, ast.ClassDef) else ():
                if isinstance(statement, ast.AnnAssign) and "ClassVar" not in ast.unparse(statement.annotation):
                    names[ast.unparse(statement.target)] = statement.value is None
        required = frozenset(name for name, needed in names.items() if needed)
        return Signature(tuple(names), frozenset(), required) if names else None


def origin(statement: ast.ImportFrom, package: str) -> str:
    """Return the module that an import takes names from."""
    if not statement.level:
        return statement.module or ""
    parts = package.split(".")
    parts = parts[: len(parts) - statement.level + 1]
    return ".".join([*parts, *([statement.module] if statement.module else [])])


def _of_function(function: Function, *, drop_first: bool) -> Signature:
    given = function.args
    positional = [each.arg for each in (*given.posonlyargs, *given.args)]
    required = set(positional[: len(positional) - len(given.defaults)])
    required |= {each.arg for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is None}
    if drop_first:
        required.discard(positional[0] if positional else "")
        positional = positional[1:]
    by_name = frozenset(each.arg for each in given.kwonlyargs)
    return Signature(
        tuple(positional), by_name, frozenset(required), (given.vararg is not None, given.kwarg is not None)
    )


def _statements(body: Iterable[Statement]) -> Iterator[Statement]:
    """Yield the statements of a body and its branches, without the bodies of functions and classes."""
    for statement in body:
        yield statement
        if not isinstance(statement, Function | ast.ClassDef):
            for field in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(statement, field, ()))
            for handler in getattr(statement, "handlers", ()):
                yield from _statements(handler.body)


def _bound(statement: Statement) -> list[str]:
    if isinstance(statement, Function | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [(each.asname or each.name).split(".")[0] for each in statement.names]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [node.id for target in targets if target is not None for node in ast.walk(target)
            if isinstance(node, ast.Name)]  # fmt: skip


def _members(node: ast.ClassDef) -> Iterator[tuple[str, Statement]]:
    """Yield the names that a class body binds, then the attributes that its methods set on self."""
    for statement in _statements(node.body):
        for name in _bound(statement):
            yield name, statement
    for method in (each for each in _statements(node.body) if isinstance(each, Function) and each.args.args):
        instance = method.args.args[0].arg
        for each in ast.walk(method):
            targets = each.targets if isinstance(each, ast.Assign) else [each.target] if isinstance(
                each, ast.AnnAssign | ast.AugAssign) else []  # fmt: skip
            for target in (part for whole in targets for part in ast.walk(whole)):
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == instance:
                    yield target.attr, ast.copy_location(ast.Assign([target], ast.Constant(None)), each)


def _rank(statement: Statement) -> int:
    if isinstance(statement, Function) and any("overload" in ast.unparse(each) for each in statement.decorator_list):
        return 2
    return int(isinstance(statement, ast.Assign | ast.AnnAssign))


def _is_dataclass(node: Statement | None) -> bool:
    decorators = node.decorator_list if isinstance(node, ast.ClassDef) else []
    return any(re.search(r"\b(dataclass|config)\b", ast.unparse(each)) for each in decorators)


def _is_declaration(node: Statement) -> bool:
    return isinstance(node, ast.AnnAssign) and node.value is None


@cache
def _has_outside(name: str, attribute: str) -> bool:
    """Return whether a class outside the folder has the attribute; False if it cannot be imported."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            outside: object = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            outside = getattr(outside, part, None)
        return hasattr(outside, attribute) or any(
            attribute in vars(each).get("__annotations__", {}) for each in getattr(outside, "__mro__", ())
        )
    return False
