r"""Decimals of fractions: repeating ones, such as `0.\overline{3}`, `0.(3)` and `0.333...`, and rounded ones."""

from __future__ import annotations

import re
from fractions import Fraction

MIN_CHARS = 7
"""Minimum length of an answer that may be a rounded fraction: 0.33333 is too short for 1/3."""
_FIRST_NUMBER = re.compile(r"[0-9]*\.?[0-9]+")
_PERIOD = (
    r"\\(?:overline|bar)\s*(?:\{\s*(?P<line>[0-9]{1,60})\s*\}|(?P<bare>[0-9]))"
    r"|\((?P<round>[0-9]{1,60})\)(?![0-9!^])"
    r"|(?P<dots>(?:\\dot\s*(?:\{[0-9]\}|[0-9])[0-9]{0,58}?){1,2})(?![0-9]|\\dot)"
    r"|(?P<marks>(?:[0-9]\u0305){1,60}|[0-9]\u0307(?:[0-9]{0,58}[0-9]\u0307)?)"
)
_REPEATING = re.compile(rf"(?<![0-9.,])(?P<whole>[0-9]{{0,30}})\.(?P<fixed>[0-9]{{0,60}}?)(?:{_PERIOD})")
_ELLIPSIS = re.compile(
    r"(?<![0-9.,])(?P<whole>[0-9]{0,30})\.(?P<fixed>[0-9]{0,30}?)"
    r"(?P<period>(?P<one>[0-9])(?P=one){2,}|(?P<block>[0-9]{2,30}?)(?P=block)+)\s*(?:\.\.\.|\u2026|\\[lc]?dots)"
)
_BRACES = re.compile(r"\{(\\(?:overline|bar|dot)\{[0-9]{1,60}\})\}")
_NOT_DIGITS = re.compile(r"[^0-9]")


def expand_repeating(text: str) -> str:
    r"""Write each repeating decimal of a text as \frac{a}{b}.

    An ellipsis counts if the digits before it repeat: one digit three times, or a block twice.
    """
    if "." not in text:
        return text
    return _ELLIPSIS.sub(_of_ellipsis, _REPEATING.sub(_of_marks, _BRACES.sub(r"\1", text)))


def _of_marks(match: re.Match[str]) -> str:
    groups = match.groupdict()
    period = next(text for name in ("line", "bare", "round", "dots", "marks") if (text := groups[name]) is not None)
    return _fraction(groups["whole"], groups["fixed"], _NOT_DIGITS.sub("", period))


def _of_ellipsis(match: re.Match[str]) -> str:
    return _fraction(match["whole"], match["fixed"], match["one"] or match["block"])


def _fraction(whole: str, fixed: str, period: str) -> str:
    head, scale = int(f"{whole}{fixed}" or 0), 10 ** len(fixed)
    value = Fraction(head, scale) + Fraction(int(period), scale * (10 ** len(period) - 1))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def is_rounded(given: Fraction, answer: str, expected: Fraction, reference: str) -> bool:
    """Return whether one side is a fraction and the other side is its rounded or truncated decimal.

    Two decimals must be equal. So must a decimal with enough digits for the exact fraction: 0.5000001 is not 1/2.
    """
    fractions = ["/" in text or "frac" in text for text in (answer, reference)]
    close = abs(given - expected) <= min(Fraction(1, 10**6), abs(expected) / 10**5)
    if fractions[0] == fractions[1] or len(answer) < MIN_CHARS or not close:
        return False
    exact, decimal, text = (given, expected, reference) if fractions[0] else (expected, given, answer)
    unit = _last_place(decimal, text)
    if not unit or (exact / unit).denominator == 1:
        return False
    difference = abs(exact - decimal)
    return 2 * difference <= unit or (difference < unit and abs(decimal) < abs(exact))


def _last_place(decimal: Fraction, text: str) -> Fraction:
    """Return the value of a decimal's last digit: 10^-6 for 0.333333."""
    match = _FIRST_NUMBER.search(text.replace(",", ""))
    digits = match.group() if match else "0"
    mantissa = Fraction(digits)
    return abs(decimal / mantissa) / 10 ** len(digits.partition(".")[2]) if mantissa else Fraction(0)
