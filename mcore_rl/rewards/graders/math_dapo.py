"""DAPO's math grader: the answer is the text behind the last `Answer:` in the last 300 characters, on the same line.

Source: Yu et al., arXiv 2503.14476, whose prompt requests such a line and whose rewards are 1 and -1. Lewkowycz et al.,
arXiv 2206.14858, introduced the format. rewards.math_grader compares the answers.
"""

from __future__ import annotations

import re
from typing import Any

from mcore_rl.rewards.math_grader import reference_answer, same_answer
from mcore_rl.types import Score

TAIL_CHARS = 300
MISSING_ANSWER = "[INVALID]"
"""verl's prediction for a response without an answer."""
_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")


def grade_math_dapo(response: str, ground_truth: Any) -> Score:
    """Score 1 or -1; the part `pred` is the answer as written in the response."""
    answers = _ANSWER.findall(response[-TAIL_CHARS:])
    prediction = answers[-1].strip() if answers else MISSING_ANSWER
    right = bool(answers) and same_answer(prediction, reference_answer(ground_truth))
    return Score(1.0 if right else -1.0, float(right), parts={"pred": prediction})
