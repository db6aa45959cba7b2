r"""Graders with the published rules of data sets. rewards.math_grader compares expressions.

- GSM8K (Cobbe et al., arXiv 2110.14168), as verl's strict grader: the last `#### number` in the last 300 characters is
  compared with the reference as text, so `#### 18.0` and `#### 18.` do not equal 18.
- MATH and MATH-500 (Hendrycks et al., arXiv 2103.03874): the content of the last \boxed{...}.
- Geometry3K (data: Lu et al., arXiv 2105.04165), as verl: 0.9 for the answer in the last box and 0.1 for the format, in
  which `<think>...</think>` precedes the box.
- DAPO (Yu et al., arXiv 2503.14476), whose prompt requests the line `Answer: ...` (Lewkowycz et al., arXiv 2206.14858)
  and whose rewards are 1 and -1: the text behind the last `Answer:` in the last 300 characters, on the same line.
- NuminaMath by PRIME (Cui et al., arXiv 2502.01456): the last box, or the text behind `answer is` or `answer:`. A
  numeric answer is also correct within a relative 1e-4 of the reference, of its hundredth, or of 100 times the
  reference (percentages).
- Search-R1 (Jin et al., arXiv 2503.09516): the last <answer>...</answer> must equal one of the references after the
  normalization of SQuAD's exact match (Rajpurkar et al., arXiv 1606.05250): lower case, no punctuation or articles. A
  correct response with more than ten opening or closing tags gets 0.25, because it lists guesses.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from fractions import Fraction

from mcore_rl.rewards.answers import MAX_ANSWER_CHARS, last_box
from mcore_rl.rewards.math_grader import reference_answer, same_answer, value_of
from mcore_rl.types import Score

TAIL_CHARS = 300
"""Length of the end of a response that the graders of GSM8K and DAPO read."""
FORM_WEIGHT = 0.1
MISSING_ANSWER = "[INVALID]"
"""verl's prediction for a response without an answer."""
TOLERANCE = Fraction(1, 10_000)
MAX_TAGS = 10
_MARKED_NUMBER = re.compile(r"#### (-?[0-9.,]+)")
_ANSWER_LINE = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_ANSWER_IS = re.compile(r"(?i)\b(?:answer\s+is\s*:?|answer\s*:)\s*")
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def grade_gsm8k(response: str, ground_truth: object) -> Score:
    """Score 1 or 0. ground_truth: the number, or the data set's solution with `#### number`."""
    answer = marked_number(response)
    return _right_or_wrong(answer is not None and same_number(answer, ground_truth))


def grade_math_boxed(response: str, ground_truth: object) -> Score:
    """Score the answer in the last box: 1 or 0."""
    answer = last_box(response)
    return _right_or_wrong(answer is not None and same_answer(answer, reference_answer(ground_truth)))


def grade_geometry3k(response: str, ground_truth: object) -> Score:
    """Score answer and format, between 0 and 1. The accuracy covers the answer only; `format` is a part."""
    right, form = grade_math_boxed(response, ground_truth).accuracy, float(thinks_first(response))
    return Score((1 - FORM_WEIGHT) * right + FORM_WEIGHT * form, right, parts={"format": form})


def grade_math_dapo(response: str, ground_truth: object) -> Score:
    """Score 1 or -1; the part `pred` is the answer as written in the response."""
    answers = _ANSWER_LINE.findall(response[-TAIL_CHARS:])
    prediction = answers[-1].strip() if answers else MISSING_ANSWER
    right = bool(answers) and same_answer(prediction, reference_answer(ground_truth))
    return Score(1.0 if right else -1.0, float(right), parts={"pred": prediction})


def grade_prime_math(response: str, ground_truth: object) -> Score:
    """Score 1 or 0."""
    answer, reference = final_answer(response), reference_answer(ground_truth)
    return _right_or_wrong(answer is not None and (same_answer(answer, reference) or _close(answer, reference)))


def grade_search_qa(response: str, ground_truth: object) -> Score:
    """Score 1, 0.25 or 0. ground_truth: {"target": one or more answers}, or the answers alone."""
    answer = last_answer(response)
    if answer is None or normal_form(answer) not in map(normal_form, _targets(ground_truth)):
        return Score(0.0, 0.0)
    guesses = max(response.count("<answer>"), response.count("</answer>")) > MAX_TAGS
    return Score(0.25 if guesses else 1.0, 1.0)


def marked_number(response: str) -> str | None:
    """Return the spelling of the last `#### number` near the end of a response, or None."""
    answers = _MARKED_NUMBER.findall(response[-TAIL_CHARS:])
    return answers[-1] if answers else None


def same_number(answer: str, ground_truth: object) -> bool:
    """Compare a number with the reference as text, ignoring commas and dollar signs."""
    return plain(answer) == plain(str(ground_truth).rpartition("####")[2].strip())


def plain(number: str) -> str:
    """Remove commas and dollar signs."""
    return number.replace(",", "").replace("$", "")


def thinks_first(response: str) -> bool:
    """Return whether a response has the format `<think>...</think>...\\boxed{...}...`."""
    thought, ended, rest = response.partition("</think>")
    _, box, content = rest.partition("\\boxed{")
    return thought.startswith("<think>") and bool(ended and box) and "}" in content


def final_answer(response: str) -> str | None:
    """Return the content of the last box, or the text behind the last `answer is` or `answer:`."""
    box = last_box(response)
    if box is not None:
        return box
    marks = list(_ANSWER_IS.finditer(response))
    rest = response[marks[-1].end() :].strip() if marks else ""
    return re.split(r"\n|\.\s", rest, maxsplit=1)[0].rstrip(".")[:MAX_ANSWER_CHARS] or None


def last_answer(response: str) -> str | None:
    """Return the content of the last complete <answer>...</answer>, or None. Each ends at the next </answer>."""
    # Not a regular expression, which takes quadratic time for many tags that are not closed.
    answer, rest = None, response
    while True:
        _, opened, rest = rest.partition("<answer>")
        content, closed, rest = rest.partition("</answer>")
        if not opened or not closed:
            return answer
        answer = content


def normal_form(answer: str) -> str:
    """Return an answer in lower case, without punctuation, articles, and repeated spaces."""
    return " ".join(_ARTICLE.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def _right_or_wrong(right: bool) -> Score:
    return Score(float(right), float(right))


def _close(answer: str, reference: str) -> bool:
    given, expected = value_of(answer), value_of(reference)
    if given is None or expected is None:
        return False
    return any(abs(given - each) <= TOLERANCE * abs(each) for each in (expected, expected / 100, expected * 100))


def _targets(ground_truth: object) -> list[str]:
    target = ground_truth["target"] if isinstance(ground_truth, Mapping) else ground_truth
    target = target.tolist() if hasattr(target, "tolist") else target
    return [str(target)] if isinstance(target, str) or not isinstance(target, Sequence) else [*map(str, target)]
