"""Comparison of fractions with rounded decimals: 0.333333 for 1/3."""

from __future__ import annotations

import re
from fractions import Fraction

MIN_CHARS = 7
"""Minimum length of an answer that may be a rounded fraction: 0.33333 is too short for 1/3."""
_FIRST_NUMBER = re.compile(r"[0-9]*\.?[0-9]+")


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
