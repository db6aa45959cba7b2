r"""NuminaMath as PRIME grades it: the last box, or what follows `answer is` or `answer:`; a decimal may be rounded.

Source: Cui et al., arXiv 2502.01456, and the comparison of Hendrycks et al. that it begins with. Where the reference is
a number, an answer within a relative 1e-4 of it is right, and so is one of its hundredth or its hundredfold, which
stand for percentages. What is the same expression: rewards.math_grader.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from mcore_rl.rewards.answers import MAX_ANSWER_CHARS, last_box
from mcore_rl.rewards.math_grader import reference_answer, same_answer, value_of
from mcore_rl.types import Score

TOLERANCE = Fraction(1, 10_000)
_MARK = re.compile(r"(?i)\b(?:answer\s+is\s*:?|answer\s*:)\s*")


def grade_prime_math(response: str, ground_truth: Any) -> Score:
    """1 or 0."""
    answer, reference = final_answer(response), reference_answer(ground_truth)
    right = float(answer is not None and (same_answer(answer, reference) or _close(answer, reference)))
    return Score(right, right)


def final_answer(response: str) -> str | None:
    """The last box, or what follows the last mark."""
    box = last_box(response)
    if box is not None:
        return box
    marks = list(_MARK.finditer(response))
    rest = response[marks[-1].end() :].strip() if marks else ""
    return re.split(r"\n|\.\s", rest, maxsplit=1)[0].rstrip(".")[:MAX_ANSWER_CHARS] or None


def _close(answer: str, reference: str) -> bool:
    given, expected = value_of(answer), value_of(reference)
    if given is None or expected is None:
        return False
    return any(abs(given - each) <= TOLERANCE * abs(each) for each in (expected, expected / 100, expected * 100))
