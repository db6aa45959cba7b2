"""Selection of graders by a row's data_source. Names are verl's; the user's map (reward.functions) has priority."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

from mcore_rl.rewards.graders import data_sets
from mcore_rl.rewards.graders.code import grade_asserts, grade_outputs
from mcore_rl.types import Score

Grade = Callable[[str, object], Score]
"""Function of a response and its ground truth."""

PURE: dict[str, Grade] = {
    "gsm8k": data_sets.grade_gsm8k,
    "math_boxed": data_sets.grade_math_boxed,
    "math_dapo": data_sets.grade_math_dapo,
    "prime_math": data_sets.grade_prime_math,
    "geometry3k": data_sets.grade_geometry3k,
    "search_qa": data_sets.grade_search_qa,
}
"""Graders by name, except `math`, which the configuration parametrizes, and RUN_CODE."""
RUN_CODE: dict[str, Callable[..., Score]] = {"code_outputs": grade_outputs, "code_asserts": grade_asserts}
"""Graders that run code, by name."""

_SOURCES_OF = {
    "gsm8k": ["openai/gsm8k"],
    "math_boxed": ["lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"],
    "math_dapo": ["math", "math_dapo", "math_dapo_reasoning", "aime*"],
    "prime_math": ["numina_*"],
    "geometry3k": ["hiyouga/geometry3k"],
    "search_qa": ["searchR1_*"],
    "code_outputs": ["codecontests", "apps", "codeforces", "taco"],
    "code_asserts": ["*humaneval*", "*mbpp*"],
}
SOURCES = {source: name for name, sources in _SOURCES_OF.items() for source in sources}
"""Grader of each data source or pattern of data sources."""


def grader_of(data_source: str, functions: Mapping[str, str]) -> str | None:
    """Return the grader of a data source: a built-in name, or a user's function from `functions` (reward.functions).

    Exact names precede patterns, and the first matching pattern counts. Returns None if nothing matches.
    """
    return next((table[key] for table in (functions, SOURCES) if (key := _key(data_source, table)) is not None), None)


def _key(data_source: str, table: Mapping[str, str]) -> str | None:
    if data_source in table:
        return data_source
    return next((pattern for pattern in table if fnmatchcase(data_source, pattern)), None)
