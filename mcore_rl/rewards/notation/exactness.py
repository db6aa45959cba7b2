"""Exact and relative comparison of numbers inside math-verify.

math-verify compares numbers with absolute precision: it treats differences below 15 digits as 0 and rounds decimals to
6 places, so 10^{-20} equals 10^{-21}. This module keeps math-verify's structure (equations, sets, intervals, matrices)
and rejects pairs of numbers that differ:

- both sides exact, or both with decimals: no difference is allowed; a decimal has the exact value of its digits;
- one side with decimals: it may differ by rounding to 6 places, or to 6 significant digits for values below 1; a
  decimal with more places may differ by its last place only;
- expressions with variables: the same rules at fixed rational values of the variables.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from decimal import Decimal
from functools import lru_cache
from types import ModuleType

from sympy import Basic, Expr, Float, MatrixBase, Mul, Rational, UnevaluatedExpr, floor, log, sqrt

PLACES = 6
_DIGITS = 25
# Maximum digits for evaluating a difference; if more digits cancel, the difference counts as 0.
_MAX_DIGITS = 400
# First value and increment of the variables' values, in alphabetical order of the variables.
_POINTS = ((Rational(7, 5), Rational(11, 13)), (Rational(-19, 17), Rational(5, 23)))

Comparison = Callable[..., bool]


@lru_cache(maxsize=1)
def exact_grader() -> ModuleType:
    """Return a private copy of math_verify.grader whose number comparison is exact.

    It is a copy because a user's reward function may call math-verify in the same process.
    """
    spec = importlib.util.find_spec("math_verify.grader")
    assert spec is not None
    assert spec.loader is not None
    grader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(grader)
    for name in ("sympy_numeric_eq", "sympy_symbolic_eq"):
        setattr(grader, name, _unless_distinct(getattr(grader, name)))
    return grader


def are_distinct(gold: object, answer: object) -> bool:
    """Return whether two expressions have different values; False for objects without a value, such as sets."""
    if isinstance(gold, MatrixBase) and isinstance(answer, MatrixBase) and gold.shape == answer.shape:
        return any(are_distinct(one, other) for one, other in zip(gold.flat(), answer.flat(), strict=True))
    if not isinstance(gold, Expr) or not isinstance(answer, Expr):
        return False
    if gold.has(UnevaluatedExpr) != answer.has(UnevaluatedExpr):
        return False  # math-verify represents percentages with UnevaluatedExpr and accepts 9 for 9%
    approximate = gold.has(Float) != answer.has(Float)
    tolerance = _last_place(gold if gold.has(Float) else answer) if approximate else Rational(0)
    one, other = (_evaluated(_without_decimals(side)) for side in (gold, answer))
    if gold.has(Float):
        one, other = other, one  # if only one side has decimals, `one` is the exact side
    names = sorted(one.free_symbols | other.free_symbols, key=str)
    if not names:
        return _differ(one, other, tolerance)
    # At both points, one positive and one negative: \sqrt{x^2} and x differ at the negative one only.
    at_points = ([expression.subs(point) for expression in (one, other)] for point in _values(names))
    return all(_differ(left, right, tolerance) for left, right in at_points)


def _unless_distinct(equal: Comparison) -> Comparison:
    def compare(gold: Basic | MatrixBase, answer: Basic | MatrixBase, *precision: int) -> bool:
        return not are_distinct(gold, answer) and equal(gold, answer, *precision)

    return compare


def _values(names: list[Basic]) -> list[dict[Basic, Rational]]:
    return [{name: start + index * step for index, name in enumerate(names)} for start, step in _POINTS]


def _evaluated(expression: Expr) -> Expr:
    done = expression.doit()
    return done if isinstance(done, Expr) else expression


def _without_decimals(expression: Expr) -> Expr:
    exact = expression.replace(lambda part: isinstance(part, Float), lambda part: Rational(str(part)))
    return exact if isinstance(exact, Expr) else expression


def _last_place(decimal: Expr) -> Expr:
    """Return the value of a decimal's last digit, also of 1.5 * 10^n; 1 for any other expression."""
    factors = Mul.make_args(decimal)
    decimals = [factor for factor in factors if isinstance(factor, Float)]
    others = [_evaluated(factor) for factor in factors if not isinstance(factor, Float)]
    if len(decimals) != 1 or not all(isinstance(other, Rational) for other in others):
        return Rational(1)
    places = Decimal(str(decimals[0])).normalize().as_tuple().exponent
    return abs(Mul(*others)) * Rational(10) ** int(places)


def _differ(one: Expr, other: Expr, tolerance: Expr) -> bool:
    """Return whether two values differ by more than the tolerance and the rounding of PLACES; 0 is exact."""
    difference = _magnitude(one - other)
    if not difference:
        return False
    if not tolerance:
        return True
    exact = _magnitude(one)
    if exact is None:
        return False
    rounding = Rational(10) ** (min(0, _exponent(exact) + 1) - PLACES) / 2 if exact else Rational(0)
    return bool(difference > min(rounding, tolerance))


def _exponent(value: Expr) -> int:
    """Return e of the scientific form d * 10^e of a positive number."""
    return int(floor(log(value, 10).evalf(_DIGITS)))


def _magnitude(expression: Expr) -> Expr | None:
    """Return the absolute value, 0 if no digit of it is certain, or None if it is not a number."""
    if expression.is_zero:
        return Rational(0)
    parts = expression.evalf(_DIGITS, maxn=_MAX_DIGITS).as_real_imag()
    if not all(isinstance(part, Float | Rational) for part in parts):
        return None
    # evalf marks a part of which no digit is certain with precision 1.
    certain = [part for part in parts if not (isinstance(part, Float) and part._prec <= 1)]
    size = sqrt(sum(part**2 for part in certain)).evalf(_DIGITS)
    return size if isinstance(size, Expr) else None
