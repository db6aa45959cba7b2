r"""Answers in the last \boxed{...} of a response, and in nothing else.

- MATH and MATH-500: Hendrycks et al., arXiv 2103.03874: the box's content and the reference are the same expression.
- Geometry3K as verl grades it: 0.9 for the answer and 0.1 for the form, in which `<think>...</think>` comes before the
  box; Lu et al., arXiv 2105.04165, for the data.

What is the same expression: rewards.math_grader.
"""

from __future__ import annotations

from typing import Any

from mcore_rl.rewards.answers import last_box
from mcore_rl.rewards.math_grader import reference_answer, same_answer
from mcore_rl.types import Score

FORM_WEIGHT = 0.1


def grade_math_boxed(response: str, ground_truth: Any) -> Score:
    """1 or 0."""
    right = _in_box(response, ground_truth)
    return Score(right, right)


def grade_geometry3k(response: str, ground_truth: Any) -> Score:
    """Between 0 and 1; what is right is the answer alone, and the form is a part."""
    right, form = _in_box(response, ground_truth), float(thinks_first(response))
    return Score((1 - FORM_WEIGHT) * right + FORM_WEIGHT * form, right, parts={"format": form})


def thinks_first(response: str) -> bool:
    """Whether it has the form `<think>...</think>...\\boxed{...}...`."""
    thought, ended, rest = response.partition("</think>")
    _, box, content = rest.partition("\\boxed{")
    return thought.startswith("<think>") and bool(ended and box) and "}" in content


def _in_box(response: str, ground_truth: Any) -> float:
    answer = last_box(response)
    return float(answer is not None and same_answer(answer, reference_answer(ground_truth)))
