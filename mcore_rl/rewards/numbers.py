"""Parsing of numbers in answers: grouped digits, decimal commas, fractions, percentages, and currencies."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_NUMBER_CHARS = 200

_DIGITS = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{{1,3}}(?![0-9]))?"
# a sign behind an operand is a subtraction: "7-3" ends in 3, "= -3" in -3
_IN_TEXT = re.compile(rf"(?:(?<![\w.)\]}}])[-\u2212+]\s?)?\\?\$?(?<![\w.])(?P<number>{DECIMAL}(?:/{DECIMAL})?)\s?\\?%?")
_PLAIN = re.compile(rf"[-+]?{DECIMAL}")
_SLASH = re.compile(rf"([-+]?{DECIMAL})/({DECIMAL})")
_FRAC = re.compile(rf"([-+]?)\\frac\{{([-+]?{DECIMAL})\}}\{{([-+]?{DECIMAL})\}}")
_POWER_OF_TEN = re.compile(
    rf"(?:(?P<mantissa>[-+]?{DECIMAL})(?:\\times|\\cdot|\*|×|·|x)|(?P<sign>[-+]?))10\^\{{?(?P<exponent>[-+]?[0-9]{{1,3}})\}}?"
)
# digits in groups of three with one separator throughout; none of these separators separates list elements
_GROUPS = re.compile(
    r"(?<![0-9.,])[0-9]{1,3}(?P<separator>\{,\}|,(?:\\!|\{\})|\\[,;: ]|[ ~'\u2009\u202f\u00a0])[0-9]{3}"
    r"(?:(?P=separator)[0-9]{3})*(?![0-9])"
)
_SEPARATORS = re.compile(r"[^0-9]+")
_SPACED_GROUP = re.compile(r"(?<=[0-9]),\s*\\!\s*(?=[0-9]{3}(?![0-9]))")
# 3,14 and 0,125 are decimals or lists; 1,234 has grouped digits
_DECIMAL_COMMA = re.compile(r"([-+]?)([0-9]+),([0-9]+)(\s*\\?%)?")
_EUROPEAN = re.compile(r"[-+]?[0-9]{1,3}(?:\.[0-9]{3})+,[0-9]+")
WORD = re.compile(r"[A-Za-z]{2,}")
FORMULA = re.compile(r"[\\^*/=+()<>\[\]{}|_]")
MULTIPLES = frozenset("hundred thousand million billion trillion dozen pi squared cubed factorial".split())
NOT_UNITS = MULTIPLES | frozenset("minus negative sqrt or and to not times plus over mod percent".split())
"""Words that change the value of a number beside them, which units do not."""


def join_groups(text: str) -> str:
    r"""Remove digit separators, as in 12,\!000,\!023, 14{,}916, 2\,568\,332 and 10 000. Plain commas stay."""
    text = _SPACED_GROUP.sub(r",\\!", text)
    return _GROUPS.sub(lambda match: _SEPARATORS.sub("", match.group()), text)


def parse_number(text: str) -> Fraction | None:
    r"""Return the exact value of an integer, decimal (1,234.50), a/b, \frac{a}{b}, a\times10^{n} or 10^{n}; or None."""
    if not text or len(text) > MAX_NUMBER_CHARS:
        return None
    if _PLAIN.fullmatch(text):
        return _plain(text)
    if slash := _SLASH.fullmatch(text):
        return _ratio(*slash.groups())
    if frac := _FRAC.fullmatch(text):
        value = _ratio(frac.group(2), frac.group(3))
        return -value if value is not None and frac.group(1) == "-" else value
    scientific = _POWER_OF_TEN.fullmatch(text)
    if scientific is None:
        return None
    return _plain(scientific["mantissa"] or f"{scientific['sign']}1") * Fraction(10) ** int(scientific["exponent"])


def parse_decimal_comma(text: str) -> Fraction | None:
    """Return the value of a number with a decimal comma (3,14 or 1.234,50); None for grouped digits (1,234)."""
    if len(text) > MAX_NUMBER_CHARS:
        return None
    if _EUROPEAN.fullmatch(text):
        return Fraction(text.replace(".", "").replace(",", "."))
    match = _DECIMAL_COMMA.fullmatch(text)
    if match is None:
        return None
    sign, whole, digits, percent = match.groups()
    # 1,234 and 123,456 are grouped digits; 0,125 cannot be.
    if len(digits) == 3 and len(whole) <= 3 and whole.strip("0"):
        return None
    return Fraction(f"{sign}{whole}.{digits}") / (100 if percent else 1)


def number_in_words(text: str) -> str:
    """Return the number of a text of one number and words (`72 apples`); empty for any other text."""
    numbers = [match.group().strip() for match in _IN_TEXT.finditer(text)]
    if len(numbers) != 1:
        return ""
    before, _, after = text.partition(numbers[0])
    rest = f"{before} {after}"
    if before.strip() and numbers[0][1:2] == " ":
        return ""  # the sign adds to the word before it: tax + 5
    words = [word.strip(".,:;!'") for word in rest.lower().split()]
    if FORMULA.search(rest) or not all(WORD.fullmatch(word) for word in words):
        return ""
    return "" if NOT_UNITS.intersection(words) else numbers[0]


def _plain(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))


def _ratio(numerator: str, denominator: str) -> Fraction | None:
    bottom = _plain(denominator)
    return _plain(numerator) / bottom if bottom else None
