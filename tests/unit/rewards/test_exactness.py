"""Numbers that differ by less than math-verify's precision are different, anywhere in an answer."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.rewards.math_grader import is_correct

PLACES = [
    *("{}", "-{}", "({}, 1)", r"\{{{}, 1\}}", "1, {}", "[0, {}]", "(0, {}]", r"(0, {}) \cup (1, 2)"),
    *(r"\begin{{pmatrix}} {} \\ 1 \end{{pmatrix}}", "x = {}", "x + y = {}", "x < {}", "{} < x < 1", "{} i"),
    *("1 + {} i", "{} x", "x^2 + {}", r"\sqrt{{2}} \cdot {}", r"{}\text{{ m}}", r"{}\ \text{{m/s}}", r"{}\%"),
]
TINY = [
    *(("10^{-20}", "10^{-21}"), ("1/2^{98}", "1/2^{99}"), ("e^{-40}", "e^{-41}"), ("1/52!", "1/51!")),
    *((r"\pi^{-40}", r"\pi^{-41}"), (r"\frac{1}{10^{20}}", r"\frac{1}{10^{21}}")),
    *((r"1.5 \cdot 10^{-20}", r"1.6 \cdot 10^{-20}"), ("10^{-20}", "0"), ("0", "10^{-20}")),
]
CLOSE = [
    *(("10^{20}", "10^{20} + 1"), ("2^{98}", "2^{98} + 1"), ("52!", "52! - 1")),
    *((r"1.5 \times 10^{30}", r"1.5 \times 10^{30} + 1"), (r"1.5 \times 10^{16}", r"1.5 \times 10^{16} + 1")),
    *((r"1.5 \times 10^{16} + 1", "15000000000000000"), ("e^{50}", "e^{50} + 10^{-9}")),
    *((r"e^{\pi \sqrt{163}}", "262537412640768744"), ("1 + 10^{-20}", "1"), (r"\sqrt{51} + 10^{-25}", r"\sqrt{51}")),
    *(("[0, 0.5000001]", "[0, 0.5]"), ("0.5000001", r"\frac{1}{2}"), ("0.333334", r"\frac{1}{3}")),
    *(("1.41421399", r"\sqrt{2}"), ("3.14159299", r"\pi"), ("(1.4142139, 1)", r"(\sqrt{2}, 1)")),
    *(("4.2483549e-18", "e^{-40}"), ("0.33333334", r"\frac{1}{3}")),
]
EQUAL = [
    *(("1.41421356", r"\sqrt{2}"), ("3.1415926", r"\pi"), ("3.141592653589793", r"\pi")),
    *(("4.24835426e-18", "e^{-40}"), ("10^{-20}", r"\frac{1}{10^{20}}"), ("2^{-98}", r"\frac{1}{2^{98}}")),
    *(("(10^{-20}, 1)", r"(\frac{1}{10^{20}}, 1)"), (r"1.5 \cdot 10^{-20}", r"15 \cdot 10^{-21}")),
    *((r"1.414214 \cdot 10^{-20}", r"\sqrt{2} \cdot 10^{-20}"), (r"\sqrt{2} + \sqrt{3}", r"\sqrt{5 + 2 \sqrt{6}}")),
    *(("0.135335", "e^{-2}"), ("0.666667", r"\frac{2}{3}"), ("0.666666", r"\frac{2}{3}")),
    *(("[0, 0.333333]", r"[0, \frac{1}{3}]"), ("(x + 1)^2", "x^2 + 2x + 1"), (r"\sin^2(x) + \cos^2(x)", "1")),
]


@pytest.mark.parametrize("place", PLACES)
def test_tiny_numbers_that_differ_are_wrong_in_every_place(place: str) -> None:
    for one, other in (("10^{-20}", "10^{-21}"), ("e^{-40}", "e^{-41}")):
        right, wrong = place.format(one), place.format(other)
        assert not is_correct(rf"\boxed{{{right}}}", wrong), (right, wrong)
        assert not is_correct(rf"\boxed{{{wrong}}}", right), (wrong, right)


@pytest.mark.parametrize(("answer", "reference"), TINY + CLOSE)
def test_numbers_that_differ_beyond_float_precision_are_wrong(answer: str, reference: str) -> None:
    assert not is_correct(rf"\boxed{{{answer}}}", reference)
    assert not is_correct(rf"\boxed{{{reference}}}", answer)


@pytest.mark.parametrize(("answer", "reference"), EQUAL)
def test_equal_numbers_in_other_forms_stay_right(answer: str, reference: str) -> None:
    assert is_correct(rf"\boxed{{{answer}}}", reference)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 99), st.integers(1, 99), st.integers(1, 60), st.booleans())
def test_scaled_fractions_agree_with_exact_arithmetic(top: int, bottom: int, power: int, same: bool) -> None:
    value = Fraction(top, bottom) / 10**power
    other = value if same else value + Fraction(1, 10 ** (power + 20))
    shown = rf"\frac{{{other.numerator}}}{{{other.denominator}}}"
    assert is_correct(rf"\boxed{{\frac{{{top}}}{{{bottom}}} \cdot 10^{{-{power}}}}}", shown) == (other == value)


def test_users_math_verify_keeps_its_own_comparison() -> None:
    from math_verify import parse, verify

    assert not is_correct(r"\boxed{10^{-20}}", "10^{-21}")
    gold, answer = (parse(f"$10^{{-{power}}}$", parsing_timeout=None) for power in (20, 21))
    assert verify(gold, answer, timeout_seconds=None)  # math-verify's own verdict
