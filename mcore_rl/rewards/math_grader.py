"""Is the final answer of a response the reference answer? Strings and exact fractions first, math-verify for the rest.

math-verify sets its own signal alarms, which would cancel the caller's deadline and only work in a main thread: they
are switched off, so call `is_correct` under a deadline. Its plain-expression parser is not used, because it evaluates
text; the LaTeX parser builds a syntax tree.
"""

from __future__ import annotations

import logging
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from mcore_rl.rewards.answers import after_hashes, extract_answer, last_boxed, last_number, numbers_in, parse_number

MAX_SYMBOLIC_CHARS = 400
MIN_PROSE_WORDS = 3

_SPACING = re.compile(r"(?<!\\)\\[,;:! ]|\\quad|\\qquad|~|\s+")
# every space but one between digits ("1 2" is not 12), and the one that groups thousands ("10 000" is 10000)
_INNER_SPACE = re.compile(r"(?<![0-9]) | (?![0-9])|(?<=[0-9]) (?=[0-9]{3}(?![0-9]))")
_WRAPPERS = (("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$"), ("**", "**"))
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_REWRITES = (
    (re.compile(r"\\[dtc]frac"), r"\\frac"),
    (re.compile(r"\\frac\s*([0-9])\s*([0-9])"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\(?:left|right)(?![a-z])"), ""),
    (re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})"), ""),
    (re.compile(r"(?<=[0-9])\{,\}(?=[0-9])"), ","),
    (re.compile(r"\\?[$]|\u2009|\u202f|\u00a0"), ""),
    (re.compile("\u2212"), "-"),
)
_ASSIGNMENT = re.compile(r"^[A-Za-z](?:_\{?\w\}?)?\s*=\s*(?=[^=])")
_CHOICE = re.compile(r"\(([A-Z])\)")
_WORD = re.compile(r"[A-Za-z]{2,}")
_FORMULA = re.compile(r"[\\^*/=+()<>\[\]{}|_]")
# a word that changes the number it stands beside, unlike a unit
_NOT_UNITS = {
    *("hundred", "thousand", "million", "billion", "trillion", "dozen", "pi"),
    *("minus", "negative", "sqrt", "or", "and", "to", "not"),
}
# numbers that no exact arithmetic should be asked to write out
_HUGE = re.compile(r"\^\s*\{?\s*-?[0-9]{4,}|[0-9]{4,}\s*[)}]*\s*!|\^[^+=,]*\^|![)}\s]*!")


def is_correct(response: str, ground_truth: Any) -> bool:
    r"""Whether the answer extracted from `response` (answers.extract_answer) equals the reference.

    ground_truth: a number, an answer, a GSM8K solution (`... #### 72`), or a text with \boxed{...}.
    """
    answer = extract_answer(response)
    return answer is not None and same_answer(answer, reference_answer(ground_truth))


def reference_answer(ground_truth: Any) -> str:
    """The answer within a ground truth; whole sentences without a mark count as their last number."""
    text = str(ground_truth).strip()
    marked = after_hashes(text) or last_boxed(text)
    if marked is not None:
        return marked
    if len(_WORD.findall(text)) >= MIN_PROSE_WORDS and not _FORMULA.search(text):
        return last_number(text) or text
    return text


def same_answer(answer: str, reference: str) -> bool:
    """Whether two final answers mean the same; `reference` is the trusted one."""
    answer, reference = normalise(answer), normalise(reference)
    if _flat(answer) == _flat(reference):
        return bool(reference)
    expected, given = _value(reference), _value(answer)
    if expected is not None and given is None:
        given = _value(_number_with_unit(answer))
    if expected is not None and given is not None:
        return _same_value(given, answer, expected, reference)
    return _worth_parsing(answer) and _same_expression(answer, reference)


def normalise(answer: str) -> str:
    """An answer without what carries no meaning: delimiters, LaTeX spacing and fonts, currency signs, full stops."""
    text = answer.strip()
    for left, right in _WRAPPERS:
        if text.startswith(left) and text.endswith(right) and len(text) > len(left) + len(right):
            text = text[len(left) : -len(right)].strip()
    text = _TEXT.sub(r"\1", text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _SPACING.sub(" ", text).strip().rstrip(".,;:").strip()
    return _CHOICE.sub(r"\1", _ASSIGNMENT.sub("", text)) if len(text) <= MAX_SYMBOLIC_CHARS else text


def warm_up() -> None:
    """Imports and primes math-verify, so that the first response does not pay for it."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own alarms are off
    _same_expression(r"\frac{1}{2}x", "0.5x")


def _flat(text: str) -> str:
    text = _INNER_SPACE.sub("", text)
    return text.lower() if text.isalpha() and len(text) > 1 else text


def _value(text: str) -> Fraction | None:
    return parse_number(_INNER_SPACE.sub("", text.replace("\\%", "").rstrip("%").strip()))


def _same_value(given: Fraction, answer: str, expected: Fraction, reference: str) -> bool:
    if given == expected:
        return True
    percents = [text.endswith("%") for text in (answer, reference)]
    if percents == [True, False]:
        return given / 100 == expected
    if percents == [False, True]:
        return given == expected / 100
    # 0.333333 for 1/3: exact decimals are compared exactly, a rounded one as math-verify rounds
    fractions = ["/" in text or "frac" in text for text in (answer, reference)]
    return fractions[0] != fractions[1] and len(answer) > 6 and abs(given - expected) < Fraction(1, 10**6)


def _number_with_unit(answer: str) -> str:
    numbers = numbers_in(answer)
    if len(numbers) != 1:
        return ""
    before, _, after = answer.partition(numbers[0])
    rest = f"{before} {after}"
    words = rest.lower().split()
    if _FORMULA.search(rest) or any(not _WORD.fullmatch(w.strip(".,:;!'")) for w in words):
        return ""
    return "" if _NOT_UNITS.intersection(w.strip(".,:;!'") for w in words) else numbers[0]


def _worth_parsing(answer: str) -> bool:
    return len(answer) <= MAX_SYMBOLIC_CHARS and not _HUGE.search(answer) and not answer.replace(" ", "").isalpha()


def _same_expression(answer: str, reference: str) -> bool:
    from math_verify import verify

    gold = _parsed(reference)
    # strict: variables keep their names; without alarms of its own, see the module's docstring
    return bool(gold) and bool(verify(gold, _parsed(answer), timeout_seconds=None))


@lru_cache(maxsize=1024)
def _parsed(text: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    return list(parse(f"${text}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None))
