"""GSM8K grader: compares the last `#### number` near the end of a response with the reference as text.

Sources: Cobbe et al., arXiv 2110.14168 (format of the answers); verl's strict grader of openai/gsm8k, which reads the
last 300 characters. As in verl, `#### 18.0` and `#### 18.` do not equal 18.
"""

from __future__ import annotations

import re
from typing import Any

from mcore_rl.types import Score

TAIL_CHARS = 300
_ANSWER = re.compile(r"#### (-?[0-9.,]+)")


def grade_gsm8k(response: str, ground_truth: Any) -> Score:
    """Score 1 or 0. ground_truth: the number, or the data set's solution with `#### number`."""
    answer = marked_number(response)
    right = float(answer is not None and same_number(answer, ground_truth))
    return Score(right, right)


def marked_number(response: str) -> str | None:
    """Return the spelling of the last `#### number` near the end of a response, or None."""
    answers = _ANSWER.findall(response[-TAIL_CHARS:])
    return answers[-1] if answers else None


def same_number(answer: str, ground_truth: Any) -> bool:
    """Compare a number with the reference as text, ignoring commas and dollar signs."""
    return plain(answer) == plain(str(ground_truth).rpartition("####")[2].strip())


def plain(number: str) -> str:
    """Remove commas and dollar signs."""
    return number.replace(",", "").replace("$", "")
