"""verl's names for users' files where verl is not installed: modules whose contents are ours, made when they are
imported.

They are named here as texts, like a user's function: which room a name lives in matters to nobody until a file asks
for it. Nothing else of verl is there; a file that needs more needs verl, and then sees verl's own.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_TOOLS = "mcore_rl.rollout.tools.kinds.verl_names"
_SCORES = "mcore_rl.rewards.graders.verl_names"

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
    "verl.utils.reward_score": {"default_compute_score": f"{_SCORES}:default_compute_score"},
    "verl.utils.reward_score.geo3k": {"compute_score": f"{_SCORES}:score_geometry3k"},
    "verl.utils.reward_score.gsm8k": {
        "compute_score": f"{_SCORES}:score_gsm8k",
        "extract_solution": f"{_SCORES}:extract_gsm8k",
    },
    "verl.utils.reward_score.math_dapo": {"compute_score": f"{_SCORES}:score_math_dapo"},
    "verl.utils.reward_score.math_reward": {"compute_score": f"{_SCORES}:score_math"},
    "verl.utils.reward_score.prime_math": {"compute_score": f"{_SCORES}:score_prime_math"},
    "verl.utils.reward_score.search_r1_like_qa_em": {"compute_score": f"{_SCORES}:score_search_qa"},
}
"""Module -> name in it -> `module:name` of ours."""


class _StandIns(MetaPathFinder, Loader):
    """Comes after every other finder, so that a verl that is installed is found first."""

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

    def _is_ours(self) -> bool:
        """No module of ours within a verl that is installed."""
        root = sys.modules.get("verl")
        return root is None or (root.__spec__ is not None and root.__spec__.loader is self)


_FINDER = _StandIns()


def provide_verl_names() -> None:
    """From now on this process imports them; for processes that load users' files."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)
