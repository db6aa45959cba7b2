r"""Graders that read the answer from the last \boxed{...} of a response only.

- MATH and MATH-500 (Hendrycks et al., arXiv 2103.03874): the box's content must be the same expression as the
  reference.
- Geometry3K (data: Lu et al., arXiv 2105.04165) as verl grades it: 0.9 for the answer and 0.1 for the format, in which
  `<think>...</think>` precedes the box.

rewards.math_grader compares the expressions.
"""

from __future__ import annotations

from typing import Any

from mcore_rl.rewards.answers import last_box
from mcore_rl.rewards.math_grader import reference_answer, same_answer
from mcore_rl.types import Score

FORM_WEIGHT = 0.1


def grade_math_boxed(response: str, ground_truth: Any) -> Score:
    """Score the answer in the last box: 1 or 0."""
    right = _in_box(response, ground_truth)
    return Score(right, right)


def grade_geometry3k(response: str, ground_truth: Any) -> Score:
    """Score answer and format, between 0 and 1. The accuracy covers the answer only; `format` is a part."""
    right, form = _in_box(response, ground_truth), float(thinks_first(response))
    return Score((1 - FORM_WEIGHT) * right + FORM_WEIGHT * form, right, parts={"format": form})


def thinks_first(response: str) -> bool:
    """Return whether a response has the format `<think>...</think>...\\boxed{...}...`."""
    thought, ended, rest = response.partition("</think>")
    _, box, content = rest.partition("\\boxed{")
    return thought.startswith("<think>") and bool(ended and box) and "}" in content


def _in_box(response: str, ground_truth: Any) -> float:
    answer = last_box(response)
    return float(answer is not None and same_answer(answer, reference_answer(ground_truth)))
