"""GSM8K: the last `#### number` near the end of a response, compared with the reference as text.

Source: Cobbe et al., arXiv 2110.14168 (the form of the data set's answers); verl's grader of openai/gsm8k in its strict
form, which reads the last 300 characters. `#### 18.0` and `#### 18.` are not 18 there, and neither are they here.
"""

from __future__ import annotations

import re
from typing import Any

from mcore_rl.types import Score

TAIL_CHARS = 300
_ANSWER = re.compile(r"#### (-?[0-9.,]+)")


def grade_gsm8k(response: str, ground_truth: Any) -> Score:
    """1 or 0. ground_truth: the number, or the data set's solution with `#### number`."""
    answer = marked_number(response)
    right = float(answer is not None and same_number(answer, ground_truth))
    return Score(right, right)


def marked_number(response: str) -> str | None:
    """The last `#### number` near the end, as it is written."""
    answers = _ANSWER.findall(response[-TAIL_CHARS:])
    return answers[-1] if answers else None


def same_number(answer: str, ground_truth: Any) -> bool:
    """As texts, but for commas and dollars."""
    return plain(answer) == plain(str(ground_truth).rpartition("####")[2].strip())


def plain(number: str) -> str:
    return number.replace(",", "").replace("$", "")
