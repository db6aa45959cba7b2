r"""Times of day: `7{:}30`, `07:30` and `7:30 p.m.`. Two digits after the colon distinguish them from ratios."""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_CHARS = 400
"""Longer answers are not parsed as times."""

_COLON = re.compile(
    r"\{\s*:\s*\}|\s*\\colon(?![A-Za-z])\s*|\\(?:math(?:bin|punct|rel|ord)|text)\s*\{\s*:\s*\}|(?:\\!)+:(?:\\!)*|:(?:\\!)+|\u2236|\uff1a"
)
_WRAPPER = re.compile(r"\\(?:text|textrm|mathrm|textbf|mathbf|mbox)\s*\{([^{}]*)\}")
_SPACING = re.compile(r"\\[,;: ]|\\q?quad|~|\s+")
_TIME = re.compile(
    r"\$?\s*(?P<hour>[0-9]{1,2}):(?P<minute>[0-5][0-9])(?::(?P<second>[0-5][0-9]))?\s*\$?\s*"
    r"(?:(?P<half>[ap])\.?\s?m\.?|o'?clock|h|hours?)?\.?\s*\$?",
    re.IGNORECASE,
)


class Time(NamedTuple):
    """A time of day. half: "a" (a.m.), "p" (p.m.), or empty."""

    hour: int
    minute: int
    second: int
    half: str


def plain_colons(text: str) -> str:
    """Write every kind of colon as `:`."""
    return _COLON.sub(":", text)


def parse_time(text: str) -> Time | None:
    """Parse a time of day; None for any other text, such as the ratio 3:4."""
    if len(text) > MAX_CHARS:
        return None
    text = _SPACING.sub(" ", _WRAPPER.sub(r" \1 ", plain_colons(text))).strip()
    match = _TIME.fullmatch(text)
    if match is None or int(match["hour"]) > 24:
        return None
    return Time(int(match["hour"]), int(match["minute"]), int(match["second"] or 0), (match["half"] or "").lower())


def same_time(given: Time, expected: Time) -> bool:
    """Return whether two times are equal. A time without a.m. or p.m. may be on the 12-hour or the 24-hour clock."""
    if given[1:3] != expected[1:3]:
        return False
    if bool(given.half) == bool(expected.half):
        return (given.hour, given.half) == (expected.hour, expected.half)
    # 7:30 p.m. is equal to 7:30 and to 19:30.
    named, other = (given, expected) if given.half else (expected, given)
    return other.hour in (named.hour, named.hour % 12 + (12 if named.half == "p" else 0))
