"""Search-R1's grader: the last <answer>...</answer> must equal one of the references after normalization.

Source: Jin et al., arXiv 2503.09516 (Search-R1), with the normalization of SQuAD's exact match (Rajpurkar et al.,
arXiv 1606.05250): lower case, no punctuation or articles. A correct response with more than ten opening or closing tags
gets 0.25, because it lists guesses.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from mcore_rl.types import Score

MAX_TAGS = 10
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def grade_search_qa(response: str, ground_truth: Any) -> Score:
    """Score 1, 0.25 or 0. ground_truth: {"target": one or more answers}, or the answers alone."""
    answer = last_answer(response)
    if answer is None or normal_form(answer) not in map(normal_form, _targets(ground_truth)):
        return Score(0.0, 0.0)
    guesses = max(response.count("<answer>"), response.count("</answer>")) > MAX_TAGS
    return Score(0.25 if guesses else 1.0, 1.0)


def last_answer(response: str) -> str | None:
    """Return the content of the last complete <answer>...</answer>, or None. Each ends at the next </answer>."""
    answer, rest = None, response
    while True:
        _, opened, rest = rest.partition("<answer>")
        content, closed, rest = rest.partition("</answer>")
        if not opened or not closed:
            return answer
        answer = content


def _targets(ground_truth: Any) -> list[str]:
    target = ground_truth["target"] if isinstance(ground_truth, Mapping) else ground_truth
    target = target.tolist() if hasattr(target, "tolist") else target
    several = isinstance(target, Sequence) and not isinstance(target, str)
    return [str(each) for each in target] if several else [str(target)]


def normal_form(answer: str) -> str:
    """Return an answer in lower case, without punctuation, articles, and repeated spaces."""
    return " ".join(_ARTICLE.sub(" ", answer.lower().translate(_PUNCTUATION)).split())
