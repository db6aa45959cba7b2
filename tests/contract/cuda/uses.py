"""Uses of a package in a file: names that it imports or accesses through them, and their calls.

Instances are followed if the source shows their class: an annotated parameter or attribute, a name after `isinstance`,
`super()` of a class that inherits from it, and the expressions that the caller of `uses` declares.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Call:
    """Arguments of a call: number of positional ones, and keywords. `more`: others are unpacked with * or **."""

    positional: int
    keywords: tuple[str, ...]
    more: bool


@dataclass(frozen=True)
class Use:
    """Use of a dotted name. bound: accessed through an instance."""

    name: str
    where: str
    call: Call | None = None
    bound: bool = False


@dataclass(frozen=True)
class Meaning:
    """Meaning of an expression: a dotted name, or an instance of the class with that name."""

    name: str
    instance: bool = False


def uses(file: Path, package: str, instances: Mapping[str, str] | None = None) -> list[Use]:
    """Return all uses of `package` in a file. `instances`: expression as written in the file -> its class."""
    known = {text: Meaning(name, instance=True) for text, name in (instances or {}).items()}
    reader = _Reader(file.name, package, known)
    reader.visit(ast.parse(file.read_text(encoding="utf-8")))
    return reader.uses


class _Reader(ast.NodeVisitor):
    def __init__(self, file: str, package: str, known: Mapping[str, Meaning]) -> None:
        self.uses: list[Use] = []
        self._file, self._package = file, package
        self._known = dict(known)

    def visit_Import(self, node: ast.Import) -> None:
        for each in node.names:
            if each.name.split(".")[0] == self._package:
                self._use(Meaning(each.name), node)
                self._known[each.asname or self._package] = Meaning(each.name if each.asname else self._package)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or (node.module or "").split(".")[0] != self._package:
            return
        for each in node.names:
            meaning = Meaning(f"{node.module}.{each.name}")
            self._use(meaning, node)
            self._known[each.asname or each.name] = meaning

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        bases = [meaning for base in node.bases if (meaning := self._meaning(base)) and not meaning.instance]
        with_super = {"super()": Meaning(bases[0].name, instance=True)} if bases else {}
        declared = {
            f"self.{ast.unparse(each.target)}": Meaning(meaning.name, instance=True)
            for each in node.body
            if isinstance(each, ast.AnnAssign) and (meaning := self._meaning(each.annotation))
        }
        self._within(node, with_super | declared)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        annotated = {
            each.arg: Meaning(meaning.name, instance=True)
            for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            if each.annotation is not None and (meaning := self._meaning(each.annotation))
        }
        self._within(node, annotated)

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        narrowed = {ast.unparse(call.args[0]): Meaning(meaning.name, instance=True) for call in _isinstances(node.test)
                    if (meaning := self._meaning(call.args[1]))}  # fmt: skip
        before = dict(self._known)
        self._known |= narrowed
        for statement in node.body:
            self.visit(statement)
        self._known = {name: meaning for name, meaning in self._known.items() if name not in narrowed} | {
            name: before[name] for name in narrowed if name in before
        }
        for statement in node.orelse:
            self.visit(statement)

    def visit_Call(self, node: ast.Call) -> None:
        meaning = self._meaning(node.func)
        if meaning is None:
            self.visit(node.func)
        else:
            positional = sum(not isinstance(each, ast.Starred) for each in node.args)
            keywords = tuple(each.arg for each in node.keywords if each.arg is not None)
            more = positional < len(node.args) or len(keywords) < len(node.keywords)
            self._use(meaning, node, Call(positional, keywords, more), bound=self._is_bound(node.func))
        for argument in (*node.args, *(each.value for each in node.keywords)):
            self.visit(argument)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        meaning = self._meaning(node)
        if meaning is None or meaning == self._known.get(ast.unparse(node)):
            self.visit(node.value)
        else:
            self._use(meaning, node)

    def _within(self, node: ast.ClassDef | ast.FunctionDef, names: Mapping[str, Meaning]) -> None:
        before = dict(self._known)
        self._known |= names
        self.generic_visit(node)
        # Imports inside a function stay known after it: a name has one meaning in a file.
        self._known = {name: meaning for name, meaning in self._known.items() if name not in names} | {
            name: before[name] for name in names if name in before
        }

    def _meaning(self, node: ast.expr) -> Meaning | None:
        text = ast.unparse(node)
        if text in self._known:
            return self._known[text]
        if isinstance(node, ast.Constant) and isinstance(node.value, str):  # an annotation in quotes
            return self._known.get(node.value)
        if isinstance(node, ast.Attribute) and (owner := self._meaning(node.value)):
            return Meaning(f"{owner.name}.{node.attr}")
        return None

    def _is_bound(self, node: ast.expr) -> bool:
        owner = self._meaning(node.value) if isinstance(node, ast.Attribute) else None
        return owner is not None and owner.instance

    def _use(
        self, meaning: Meaning, node: ast.stmt | ast.expr, call: Call | None = None, *, bound: bool = False
    ) -> None:
        if not meaning.instance or call is None:
            self.uses.append(Use(meaning.name, f"{self._file}:{node.lineno}", call, bound))


def _isinstances(test: ast.expr) -> Iterator[ast.Call]:
    for each in ast.walk(test):
        if isinstance(each, ast.Call) and ast.unparse(each.func) == "isinstance" and len(each.args) == 2:
            yield each


def keys_of(node: ast.AST, variable: str) -> dict[str, ast.expr]:
    """Return the string keys of the dictionary `variable`: literals, unions, updates and item assignments."""
    pairs: dict[str, ast.expr] = {}
    for each in ast.walk(node):
        if isinstance(each, ast.Assign | ast.AnnAssign | ast.AugAssign) and each.value is not None:
            target = each.targets[0] if isinstance(each, ast.Assign) else each.target
            if ast.unparse(target) == variable:
                pairs |= _pairs(each.value)
            elif isinstance(target, ast.Subscript) and ast.unparse(target.value) == variable:
                pairs |= {target.slice.value: each.value} if isinstance(target.slice, ast.Constant) else {}
        elif isinstance(each, ast.Call) and ast.unparse(each.func) == f"{variable}.update":
            pairs |= _pairs(each.args[0])
    return pairs


def returned_keys(node: ast.AST, function: str) -> dict[str, ast.expr]:
    """Return the string keys of the dictionaries that `function` returns, or {} without such a function."""
    pairs: dict[str, ast.expr] = {}
    for each in ast.walk(node):
        if isinstance(each, ast.FunctionDef) and each.name == function:
            for inner in ast.walk(each):
                if isinstance(inner, ast.Return) and inner.value is not None:
                    pairs |= _pairs(inner.value)
    return pairs


def _pairs(node: ast.expr) -> dict[str, ast.expr]:
    if not isinstance(node, ast.Dict):
        return {}
    return {key.value: value for key, value in zip(node.keys, node.values, strict=True)
            if isinstance(key, ast.Constant) and isinstance(key.value, str)}  # fmt: skip
