r"""Parsing of numbers in answers: grouped digits, decimal commas, fractions, percentages, and currencies.

Decimals of fractions may be repeating, such as `0.\overline{3}`, `0.(3)` and `0.333...`, or rounded.
"""

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
MIN_ROUNDED_CHARS = 7
"""Minimum length of an answer that may be a rounded fraction: 0.33333 is too short for 1/3."""
_FIRST_NUMBER = re.compile(r"[0-9]*\.?[0-9]+")
# Capturing groups of _REPEATING and _ELLIPSIS: whole part, fixed decimals, alternatives of the period. The last group
# that is not empty is the period.
_PERIOD = (
    r"\\(?:overline|bar)\s*(?:\{\s*([0-9]{1,60})\s*\}|([0-9]))"
    r"|\(([0-9]{1,60})\)(?![0-9!^])"
    r"|((?:\\dot\s*(?:\{[0-9]\}|[0-9])[0-9]{0,58}?){1,2})(?![0-9]|\\dot)"
    r"|((?:[0-9]\u0305){1,60}|[0-9]\u0307(?:[0-9]{0,58}[0-9]\u0307)?)"
)
_REPEATING = re.compile(rf"(?<![0-9.,])([0-9]{{0,30}})\.([0-9]{{0,60}}?)(?:{_PERIOD})")
_ELLIPSIS = re.compile(
    r"(?<![0-9.,])([0-9]{0,30})\.([0-9]{0,30}?)"
    r"((?P<one>[0-9])(?P=one){2,}|(?P<block>[0-9]{2,30}?)(?P=block)+)\s*(?:\.\.\.|\u2026|\\[lc]?dots)"
)
_BRACES = re.compile(r"\{(\\(?:overline|bar|dot)\{[0-9]{1,60}\})\}")
_NOT_DIGITS = re.compile(r"[^0-9]")
WORD = re.compile(r"[A-Za-z]{2,}")
FORMULA = re.compile(r"[\\^*/=+()<>\[\]{}|_]")
MULTIPLES = frozenset("hundred thousand million billion trillion dozen pi squared cubed factorial".split())
NOT_UNITS = MULTIPLES | frozenset("minus negative sqrt or and to not times plus over mod percent".split())
"""Words that change the value of the number before them. Units do not."""


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


def expand_repeating(text: str) -> str:
    r"""Write each repeating decimal of a text as \frac{a}{b}.

    An ellipsis counts if the digits before it repeat: one digit three times, or a block twice.
    """
    if "." not in text:
        return text
    return _ELLIPSIS.sub(_fraction, _REPEATING.sub(_fraction, _BRACES.sub(r"\1", text)))


def _fraction(match: re.Match[str]) -> str:
    whole, fixed, *periods = match.groups()
    period = _NOT_DIGITS.sub("", next(filter(None, reversed(periods))))
    head, scale = int(f"{whole}{fixed}" or 0), 10 ** len(fixed)
    value = Fraction(head, scale) + Fraction(int(period), scale * (10 ** len(period) - 1))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def is_rounded(given: Fraction, answer: str, expected: Fraction, reference: str) -> bool:
    """Return whether one side is a fraction and the other side is its rounded or truncated decimal.

    Two decimals must be equal. So must a decimal with enough digits for the exact fraction: 0.5000001 is not 1/2.
    """
    fractions = ["/" in text or "frac" in text for text in (answer, reference)]
    close = abs(given - expected) <= min(Fraction(1, 10**6), abs(expected) / 10**5)
    if fractions[0] == fractions[1] or len(answer) < MIN_ROUNDED_CHARS or not close:
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


def _plain(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))


def _ratio(numerator: str, denominator: str) -> Fraction | None:
    bottom = _plain(denominator)
    return _plain(numerator) / bottom if bottom else None
