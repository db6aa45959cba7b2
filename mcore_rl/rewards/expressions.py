r"""Comparison of LaTeX expressions with math-verify, limited in size, time (1 s), and memory (512 MiB).

math-verify computes while it parses: a few characters (`9^{999\cdot999}`) can produce a number too large for memory, in
a single C call that no signal interrupts. The evaluated size is therefore first bounded from the text. Small
expressions may still need too much time or memory; they then count as different.

math-verify's own signal alarms are disabled because they would cancel the caller's deadline. The time limit counts CPU
time with a separate timer and works in the main thread only. The memory limit counts address space and works on Linux
only. math-verify's plain-expression parser is unused because it evaluates text; the LaTeX parser builds a syntax tree.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from mcore_rl.rewards.processes.deadline import Deadline, DeadlineExceeded

MAX_SECONDS = 1.0
MAX_BYTES = 512 * 2**20
MAX_CHARS = 400
MAX_DEPTH = 8
MAX_DIGITS = 2000
"""Maximum digits of all numbers in the expanded expression."""
MAX_TERMS = 300
"""Maximum summands of the expanded expression."""

_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|[0-9]+(?:\.[0-9]+)?|\.[0-9]+|\S", re.DOTALL)
_CLOSERS = {"{": "}", "(": ")", "[": "]", r"\{": r"\}"}
_ENDS = frozenset(_CLOSERS.values())
_ADDITIVE = frozenset(["+", "-", r"\pm", r"\mp", ",", ";", "=", "<", ">", "&", r"\\", r"\cup"])
# the size of these cannot be bounded from the text, and final answers do not contain them
_UNBOUNDED = re.compile(r"\\(?:sum|prod|int|lim|bigcup|bigcap)(?![A-Za-z])")


class _ExpandedSize(NamedTuple):
    """Upper bounds of an expanded expression.

    digits: total of all numbers; magnitude: log10 of the largest value; terms: summands of the expanded polynomial, 1
    for a plain number; plain: the expression has no variables.
    """

    digits: float
    magnitude: float
    terms: float
    plain: bool

    def times(self, other: _ExpandedSize) -> _ExpandedSize:
        return _ExpandedSize(
            self.digits + other.digits,
            self.magnitude + other.magnitude,
            self.terms * other.terms,
            self.plain and other.plain,
        )

    def to_the(self, exponent: _ExpandedSize) -> _ExpandedSize:
        power = _ten_to(exponent.magnitude)
        terms = 1.0 if self.plain else _combinations(self.terms, power)
        return _ExpandedSize(
            self.digits * power + exponent.digits,
            self.magnitude * power,
            terms * exponent.terms,
            self.plain and exponent.plain,
        )

    def factorial(self) -> _ExpandedSize:
        size = _ten_to(self.magnitude) * max(1.0, self.magnitude)
        return _ExpandedSize(size, size, self.terms, self.plain)


_ONE = _ExpandedSize(0.0, 0.0, 1.0, True)
_SYMBOL = _ExpandedSize(0.0, 0.0, 1.0, False)


class TooDeep(Exception):
    """Brackets nest deeper than MAX_DEPTH."""


def is_small(text: str) -> bool:
    """Estimate from the text whether an expression can be parsed and compared with little time and memory."""
    if len(text) > MAX_CHARS or _UNBOUNDED.search(text):
        return False
    size, tokens = _ONE, _TOKEN.findall(text)[::-1]
    try:
        while tokens:
            size = size.times(_sequence(tokens, 0))
            del tokens[-1:]  # an unmatched closing bracket
    except TooDeep:
        return False
    return size.digits <= MAX_DIGITS and size.terms <= MAX_TERMS


def same_expression(answer: str, reference: str, value: Fraction | None = None) -> bool:
    """Return whether math-verify finds two expressions equal. value: the reference's value if it is a number.

    Call it through within_limits.
    """
    from mcore_rl.rewards.notation.exactness import exact_grader

    if not is_small(answer) or not is_small(reference):
        return False
    gold = _parsed(reference)
    # math-verify rounds decimals to six places; numbers below 1 need more places for six significant digits
    places = 6 if not value or abs(value) >= 1 else 6 - math.floor(math.log10(abs(value)))
    if not gold:
        return False
    # strict by default: variables keep their names. timeout_seconds=None disables the alarms (module docstring).
    return bool(exact_grader().verify(gold, _parsed(answer), float_rounding=places, timeout_seconds=None))


def within_limits(compare: Callable[[], bool]) -> bool:
    """Return `compare()`, or False if it needs more than MAX_SECONDS or MAX_BYTES."""
    warm_up()
    with contextlib.suppress(MemoryError, RecursionError), _memory_limit():
        if threading.current_thread() is not threading.main_thread():
            return compare()
        # CPU time, so that a busy machine does not change verdicts; the caller's deadline uses the other timer.
        deadline = Deadline(MAX_SECONDS, signal.ITIMER_PROF)
        try:
            return deadline.call(compare)
        except DeadlineExceeded as exceeded:
            if exceeded.deadline is not deadline:
                raise  # the caller's deadline
    return False


@lru_cache(maxsize=1)
def warm_up() -> None:
    """Import math-verify and compare once, so that the first answer does not spend its time limit on imports."""
    for name in ("math_verify", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)  # it warns that its alarms are disabled
    same_expression(r"\frac{1}{2}x", "0.5x")


@lru_cache(maxsize=1024)
def _parsed(text: str) -> list[object]:
    from math_verify import LatexExtractionConfig, parse

    return list(parse(f"${text}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None))


@contextlib.contextmanager
def _memory_limit() -> Iterator[None]:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        yield
        return
    # The limit counts the whole address space, so MAX_BYTES comes on top of the current size.
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [pages * resource.getpagesize() + MAX_BYTES, *(x for x in (soft, hard) if x != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _sequence(tokens: list[str], depth: int) -> _ExpandedSize:
    """Return the size of an expression up to its closing bracket. Read tokens are removed from the end of `tokens`.

    Sums are bounded like products, except for their number of terms.
    """
    if depth > MAX_DEPTH:
        raise TooDeep
    value, terms, product = _ONE, 0.0, 1.0
    last = _ONE
    while tokens and tokens[-1] not in _ENDS:
        token = tokens[-1]
        # last: previous factor, to which a power or factorial applies; product: terms of the current summand
        if token == "^":
            tokens.pop()
            raised = last.to_the(_exponent(tokens, depth))
            value, product = value.times(raised), product / last.terms * raised.terms
            last = raised
        elif token == "!":
            tokens.pop()
            last = last.factorial()
            value = value.times(last)
        elif token in _ADDITIVE:
            tokens.pop()
            terms, product, last = terms + product, 1.0, _ONE
        else:
            last = _atom(tokens, depth)
            value, product = value.times(last), product * last.terms
    return value._replace(terms=1.0 if value.plain else terms + product)


def _exponent(tokens: list[str], depth: int) -> _ExpandedSize:
    """Read an exponent; powers are right-associative: 9^9^9 is 9^(9^9)."""
    exponent = _atom(tokens, depth)
    if tokens and tokens[-1] == "^":
        tokens.pop()
        return exponent.to_the(_exponent(tokens, depth))
    return exponent


def _atom(tokens: list[str], depth: int) -> _ExpandedSize:
    if not tokens:
        return _ONE
    token = tokens.pop()
    if token in _CLOSERS:
        inner = _sequence(tokens, depth + 1)
        del tokens[-1:]  # the closing bracket, which may be missing
        return inner
    if token[-1].isdecimal() and token[0] != "\\":
        whole = token.partition(".")[0].lstrip("0")
        return _ExpandedSize(len(token), max(0.3, math.log10(float(whole[:15] or 1)) + len(whole[15:])), 1.0, True)
    if token in (r"\binom", r"\dbinom", r"\tbinom"):
        upper, lower = _atom(tokens, depth), _atom(tokens, depth)
        return upper.times(lower).factorial()
    if token == r"\end":  # a matrix: each entry of a power is a sum over all entries
        _atom(tokens, depth)
        return _ExpandedSize(0.0, 0.0, 4.0, False)
    return _ONE if token in (r"\frac", r"\cdot", r"\times", "*", "/", "_", "|") else _SYMBOL


def _ten_to(magnitude: float) -> float:
    return 10.0 ** min(magnitude, 12.0)  # capped above all limits, so that nested powers stay finite


def _combinations(terms: float, power: float) -> float:
    """Return the number of summands of an expanded power of a sum; powers below 1 count as 1."""
    if terms <= 1:
        return 1.0
    power = min(max(power, 1.0), 1e6)
    return math.exp(min(math.lgamma(terms + power) - math.lgamma(power + 1) - math.lgamma(terms), 300.0))
