"""Finds the final answer in a response, and reads numbers out of answers. Text is only ever parsed, never evaluated."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_ANSWER_CHARS = 1000
MAX_BOX_CANDIDATES = 4
MAX_NUMBER_CHARS = 200

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{{1,3}}(?![0-9]))?"
# a sign counts only where nothing precedes it that it could be subtracted from: "7-3" ends in 3, "= -3" in -3
_IN_TEXT = re.compile(
    rf"(?:(?<![\w.)\]}}])[-\u2212+]\s?)?\\?\$?(?<![\w.])(?P<number>{_DECIMAL}(?:/{_DECIMAL})?)\s?\\?%?"
)
_PLAIN = re.compile(rf"[-+]?{_DECIMAL}")
_SLASH = re.compile(rf"([-+]?{_DECIMAL})/({_DECIMAL})")
_FRAC = re.compile(rf"([-+]?)\\frac\{{([-+]?{_DECIMAL})\}}\{{([-+]?{_DECIMAL})\}}")


def extract_answer(response: str) -> str | None:
    r"""The final answer of a response: the last \boxed{...}, else what follows the last ####, else the last number."""
    boxed = last_boxed(response)
    if boxed is not None:
        return boxed
    marked = after_hashes(response)
    if marked is not None:
        return marked
    return last_number(response)


def last_boxed(text: str) -> str | None:
    r"""Content of the last complete \boxed{...} (braces may nest), or of `\boxed 5`."""
    if "box" not in text:
        return None
    starts = [match.end() for match in _BOX.finditer(text)]
    for start in reversed(starts[-MAX_BOX_CANDIDATES:]):
        content = _braced(text, start)
        if content is not None:
            return content.strip()
    return None


def after_hashes(text: str) -> str | None:
    """What follows the last `####` on its line; None where there is nothing."""
    _, found, rest = text.rpartition("####")
    line = rest.strip().split("\n", 1)[0].strip() if found else ""
    return line[:MAX_ANSWER_CHARS] or None


def last_number(text: str) -> str | None:
    """The last number of a text, with its sign, fraction bar and percent sign."""
    for line in reversed(text.splitlines()):
        numbers = numbers_in(line)
        if numbers:
            return numbers[-1]
    return None


def numbers_in(text: str) -> list[str]:
    """All numbers of a text."""
    return [match.group().strip() for match in _IN_TEXT.finditer(text)]


def parse_number(text: str) -> Fraction | None:
    r"""The exact value of an integer, decimal (1,234.50), a/b or \frac{a}{b}; None for anything else."""
    if not text or len(text) > MAX_NUMBER_CHARS:
        return None
    if _PLAIN.fullmatch(text):
        return Fraction(text.replace(",", ""))
    slash = _SLASH.fullmatch(text)
    if slash:
        return _ratio(*slash.groups())
    frac = _FRAC.fullmatch(text)
    if frac:
        value = _ratio(frac.group(2), frac.group(3))
        return -value if value is not None and frac.group(1) == "-" else value
    return None


def _ratio(numerator: str, denominator: str) -> Fraction | None:
    bottom = Fraction(denominator.replace(",", ""))
    return Fraction(numerator.replace(",", "")) / bottom if bottom else None


def _braced(text: str, start: int) -> str | None:
    if not text.startswith("{", start):
        word = re.match(r"[^\s${}\\]+", text[start : start + MAX_ANSWER_CHARS])
        return word.group().rstrip(".,") if word else None
    depth, position, end = 0, start, min(len(text), start + MAX_ANSWER_CHARS)
    while position < end:
        char = text[position]
        if char == "\\":
            position += 1  # an escaped brace is a symbol
        elif char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                return text[start + 1 : position]
        position += 1
    return None
