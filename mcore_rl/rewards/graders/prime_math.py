r"""PRIME's grader of NuminaMath: the answer is the last box, or the text behind `answer is` or `answer:`.

Source: Cui et al., arXiv 2502.01456, which builds on the comparison of Hendrycks et al. rewards.math_grader compares
expressions. A numeric answer is also correct within a relative 1e-4 of the reference, of its hundredth, or of 100 times
the reference (percentages).
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
    """Score 1 or 0."""
    answer, reference = final_answer(response), reference_answer(ground_truth)
    right = float(answer is not None and (same_answer(answer, reference) or _close(answer, reference)))
    return Score(right, right)


def final_answer(response: str) -> str | None:
    """Return the content of the last box, or the text behind the last `answer is` or `answer:`."""
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
