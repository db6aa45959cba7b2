"""Stand-in modules for verl, used by users' files if verl is not installed. This project implements their functions.

Functions are listed as `module:name` strings and imported when a file imports the stand-in module. Only the listed
names exist; a file that uses others requires an installed verl, which then takes precedence.

Published reward functions call verl inside `try: ... except Exception: return 0`. A missing name therefore raises
MissingVerlName, which is not an Exception, and check_verl_names detects it before the run.
"""

from __future__ import annotations

import ast
import dis
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from mcore_rl.errors import ConfigError

_TOOLS = "mcore_rl.rollout.tools.kinds.verl_names"
_SCORES = "mcore_rl.rewards.graders.verl_names"
_HELPERS = "mcore_rl.rewards.graders.verl_helpers"


def _from(source: str, names: str = "", **renamed: str) -> dict[str, str]:
    """Return {name in verl: `source:name`}. Values of `renamed` are names in `source` that differ from verl's."""
    unchanged = {name: name for name in names.split()}
    return {name: f"{source}:{own}" for name, own in (unchanged | renamed).items()}


_MATH = _from(_SCORES, compute_score="score_math") | _from(
    _HELPERS,
    "last_boxed_only_string remove_boxed is_equiv strip_string fix_fracs fix_a_slash_b fix_sqrt remove_right_units "
    "normalize_final_answer",
)
MODULES: dict[str, dict[str, str]] = {
    "verl": {},
    "verl.tools": {},
    "verl.tools.base_tool": _from(_TOOLS, "BaseTool OpenAIFunctionToolSchema ToolResponse"),
    "verl.tools.function_tool": _from(_TOOLS, "function_tool"),
    "verl.tools.schemas": _from(
        _TOOLS,
        "OpenAIFunctionPropertySchema OpenAIFunctionParametersSchema OpenAIFunctionSchema OpenAIFunctionToolSchema "
        "OpenAIFunctionParsedSchema OpenAIFunctionCallSchema OpenAIFunctionToolCall ToolResponse",
    ),
    "verl.utils": {},
    "verl.utils.rollout_trace": _from(_TOOLS, "rollout_trace_op"),
    "verl.utils.reward_score": _from(_SCORES, "default_compute_score", _default_compute_score="default_compute_score"),
    "verl.utils.reward_score.geo3k": _from(
        _SCORES, compute_score="score_geometry3k", format_reward="format_geometry3k", acc_reward="accuracy_geometry3k"
    ),
    "verl.utils.reward_score.gsm8k": _from(_SCORES, compute_score="score_gsm8k", extract_solution="extract_gsm8k"),
    "verl.utils.reward_score.math": _MATH,
    "verl.utils.reward_score.math_batch": _from(_SCORES, compute_score="score_math_batch"),
    "verl.utils.reward_score.math_dapo": _from(_SCORES, compute_score="score_math_dapo")
    | _from(
        _HELPERS,
        "remove_boxed normalize_final_answer is_correct_minerva is_correct_strict_box verify",
        last_boxed_only_string="last_braced_box",
    ),
    "verl.utils.reward_score.math_reward": _MATH,
    "verl.utils.reward_score.math_verify": _from(_SCORES, compute_score="score_math_verify"),
    "verl.utils.reward_score.prime_math": _from(_SCORES, "match_answer grade_answer", compute_score="score_prime_math")
    | _from(_HELPERS, remove_boxed="box_content"),
    "verl.utils.reward_score.prime_math.grader": _from(_SCORES, "math_equal"),
    "verl.utils.reward_score.search_r1_like_qa_em": _from(_SCORES, compute_score="score_search_qa")
    | _from("mcore_rl.rewards.graders.data_sets", normalize_answer="normal_form")
    | _from(_HELPERS, "em_check subem_check extract_solution count_answer_tags compute_score_subem"),
}
"""Module -> name in it -> `module:name` of the function that provides it."""

_PROVIDED = {*MODULES, *(f"{module}.{name}" for module, names in MODULES.items() for name in names)}
"""Dotted names of all modules and of the names in them."""
_IMPORT_ERRORS = frozenset(["ImportError", "ModuleNotFoundError"])
REMEDY = "install verl beside mcore-rl, or write the function into the file"


class MissingVerlName(BaseException):
    """A file uses a name of verl that is not provided. Not an Exception, so that `except Exception` cannot hide it."""


class _StandIns(MetaPathFinder, Loader):
    """Finder of the stand-in modules. It comes before all other finders, because a folder named verl would hide the
    modules, and finds nothing if verl is installed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MODULES or not self._is_ours():
            return None
        # `import a.b` requires that `a` is a package.
        is_package = any(name.startswith(f"{fullname}.") for name in MODULES)
        return ModuleSpec(fullname, self, origin=f"mcore-rl ({__name__})", is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        for name, place in MODULES[module.__name__].items():
            source, _, attribute = place.partition(":")
            setattr(module, name, getattr(importlib.import_module(source), attribute))
        # Python calls this function for names that the module lacks (PEP 562).
        module.__dict__["__getattr__"] = partial(_missing, module.__name__)

    def _is_ours(self) -> bool:
        """Return False if verl is installed: stand-ins are never mixed with its modules."""
        root = sys.modules.get("verl")
        if root is not None:
            return root.__spec__ is not None and root.__spec__.loader is self
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (spec for finder in others if (spec := finder.find_spec("verl", None)) is not None)
        return not any(spec.origin for spec in specs)  # a folder without __init__.py has no origin


def _missing(module: str, name: str) -> NoReturn:
    """Raise an error for a name that a stand-in module does not have.

    `module.name` in a file raises MissingVerlName. `from module import name` and hasattr() get the usual error, which
    files catch on purpose to work without verl.
    """
    error = f"{module}.{name} is not provided: verl is not installed; {REMEDY}"
    # `from module import name` and hasattr() compile to other instructions than the attribute access `module.name`.
    frame = sys._getframe(1)
    operation = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    if operation in ("LOAD_ATTR", "LOAD_METHOD") and not name.startswith("__"):
        raise MissingVerlName(f"{frame.f_code.co_filename}:{frame.f_lineno}: {error}")
    raise AttributeError(error)


_FINDER = _StandIns()


def provide_verl_names() -> None:
    """Register the stand-ins in this process; for processes that load users' files."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def parsed(path: Path) -> ast.Module:
    """Parse a file; return an empty module if it cannot be parsed, since its import reports the error."""
    try:
        return ast.parse(path.read_bytes(), str(path))
    # ValueError: NUL bytes; RecursionError: nested too deeply.
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ast.Module(body=[], type_ignores=[])


def check_verl_names(origin: str, path: Path) -> None:
    """Check that every name of verl in a file is provided, also inside functions and `try: ... except Exception`.

    Imports in `try: ... except ImportError`, or in a `try` at module level that contains only imports and assignments,
    are optional and not checked. Nothing is checked if verl is installed.

    Raises: ConfigError that begins with `origin` and names file, line, name and remedy.
    """
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.loader is not _FINDER:
        return
    for line, name in sorted(_used_names(parsed(path))):
        # Every module has names such as __file__.
        if name not in _PROVIDED and not name.rpartition(".")[2].startswith("__"):
            raise ConfigError(
                f"{origin}: {path}:{line} uses {name}, which mcore-rl does not provide, and verl is not installed; "
                f"{REMEDY}"
            )


def _used_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the dotted name of every use of a verl module."""
    modules: dict[str, str] = {}
    for node in _required(tree):
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            if isinstance(node, ast.Import) and _of_verl(alias.name):
                yield node.lineno, alias.name
                # `import verl.utils` binds the name verl.
                modules |= {alias.asname: alias.name} if alias.asname else {"verl": "verl"}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and _of_verl(node.module or ""):
                name = f"{node.module}.{alias.name}"
                if name in MODULES:
                    modules[alias.asname or alias.name] = name
                # A star import binds only names that exist, so none can be missing.
                elif alias.name != "*" or node.module not in MODULES:
                    yield node.lineno, name
    # A name that also refers to something else cannot be checked without running the file.
    for name in _bound_elsewhere(tree):
        modules.pop(name, None)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (module := _module_of(node.value, modules)) is not None:
            yield node.lineno, f"{module}.{node.attr}"


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
