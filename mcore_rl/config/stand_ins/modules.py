"""Stand-in modules for verl, used by users' files if verl is not installed. Their functions belong to this project.

Functions are listed as `module:name` texts and imported when a file imports the module. Only these names exist; a file
that needs more needs an installed verl, which then takes precedence.

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
_MATH = {
    "compute_score": f"{_SCORES}:score_math",
    **{
        name: f"{_HELPERS}:{name}"
        for name in (
            *("last_boxed_only_string", "remove_boxed", "is_equiv", "strip_string", "fix_fracs", "fix_a_slash_b"),
            *("fix_sqrt", "remove_right_units", "normalize_final_answer"),
        )
    },
}

MODULES: dict[str, dict[str, str]] = {
    "verl": {},
    "verl.tools": {},
    "verl.tools.base_tool": {
        name: f"{_TOOLS}:{name}" for name in ("BaseTool", "OpenAIFunctionToolSchema", "ToolResponse")
    },
    "verl.tools.function_tool": {"function_tool": f"{_TOOLS}:function_tool"},
    "verl.tools.schemas": {
        name: f"{_TOOLS}:{name}"
        for name in (
            *("OpenAIFunctionPropertySchema", "OpenAIFunctionParametersSchema", "OpenAIFunctionSchema"),
            *("OpenAIFunctionToolSchema", "OpenAIFunctionParsedSchema", "OpenAIFunctionCallSchema"),
            *("OpenAIFunctionToolCall", "ToolResponse"),
        )
    },
    "verl.utils": {},
    "verl.utils.rollout_trace": {"rollout_trace_op": f"{_TOOLS}:rollout_trace_op"},
    "verl.utils.reward_score": dict.fromkeys(
        ("default_compute_score", "_default_compute_score"), f"{_SCORES}:default_compute_score"
    ),
    "verl.utils.reward_score.geo3k": {
        "compute_score": f"{_SCORES}:score_geometry3k",
        "format_reward": f"{_SCORES}:format_geometry3k",
        "acc_reward": f"{_SCORES}:accuracy_geometry3k",
    },
    "verl.utils.reward_score.gsm8k": {
        "compute_score": f"{_SCORES}:score_gsm8k",
        "extract_solution": f"{_SCORES}:extract_gsm8k",
    },
    "verl.utils.reward_score.math": _MATH,
    "verl.utils.reward_score.math_batch": {"compute_score": f"{_SCORES}:score_math_batch"},
    "verl.utils.reward_score.math_dapo": {
        "compute_score": f"{_SCORES}:score_math_dapo",
        "last_boxed_only_string": f"{_HELPERS}:last_braced_box",
        **{
            name: f"{_HELPERS}:{name}"
            for name in (
                "remove_boxed",
                "normalize_final_answer",
                "is_correct_minerva",
                "is_correct_strict_box",
                "verify",
            )
        },
    },
    "verl.utils.reward_score.math_reward": _MATH,
    "verl.utils.reward_score.math_verify": {"compute_score": f"{_SCORES}:score_math_verify"},
    "verl.utils.reward_score.prime_math": {
        "compute_score": f"{_SCORES}:score_prime_math",
        "match_answer": f"{_SCORES}:match_answer",
        "grade_answer": f"{_SCORES}:grade_answer",
        "remove_boxed": f"{_HELPERS}:box_content",
    },
    "verl.utils.reward_score.prime_math.grader": {"math_equal": f"{_SCORES}:math_equal"},
    "verl.utils.reward_score.search_r1_like_qa_em": {
        "compute_score": f"{_SCORES}:score_search_qa",
        "normalize_answer": "mcore_rl.rewards.graders.data_sets:normal_form",
        **{
            name: f"{_HELPERS}:{name}"
            for name in ("em_check", "subem_check", "extract_solution", "count_answer_tags", "compute_score_subem")
        },
    },
}
"""Module -> name in it -> `module:name` of the function that provides it."""

REMEDY = "install verl beside mcore-rl, or write the function into the file"


class MissingVerlName(BaseException):
    """A file uses a name of verl that is not provided. Not an Exception, so that `except Exception` cannot hide it."""


class _StandIns(MetaPathFinder, Loader):
    """Finder placed before all others, because a folder named verl would hide the modules; an installed verl takes
    precedence."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MODULES or not self._is_ours():
            return None
        is_package = any(name.startswith(f"{fullname}.") for name in MODULES)
        return ModuleSpec(fullname, self, origin=f"mcore-rl ({__name__})", is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        for name, place in MODULES[module.__name__].items():
            source, _, attribute = place.partition(":")
            setattr(module, name, getattr(importlib.import_module(source), attribute))
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
    """Raise for a name that a module does not have.

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
