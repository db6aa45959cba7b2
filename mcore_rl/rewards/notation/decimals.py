r"""Conversion of repeating decimals: `0.\overline{3}`, `0.\dot{3}`, `0.(3)` and `0.333...` become \frac{1}{3}."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_PERIOD = 60

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
