"""Stand-in modules for verl, used by users' files if verl is not installed. This project implements their functions.

Functions are listed as `module:name` strings and imported when a file imports the stand-in module. Only the listed
names exist; a file that uses others requires an installed verl, which then takes precedence.

Published reward functions call verl inside `try: ... except Exception: return 0`. A missing name therefore raises
MissingVerlName, which is not an Exception, and check_verl_names detects it before the run.
"""

from __future__ import annotations

import dis
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

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


def stands_in() -> bool:
    """Return True if `import verl` finds the modules of this file."""
    spec = importlib.util.find_spec("verl")
    return spec is not None and spec.loader is _FINDER


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
