"""Extraction and comparison of answers in the notations of models and data sets."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.rewards.math_grader import is_correct

RIGHT = [
    # the whole last formula
    *((r"so it is \frac{1}{2}.", "1/2"), (r"so it is $\frac{1}{2}$.", "0.5"), ("The answer is 17/34.", "1/2")),
    *(("the point is (3, 4)", "(3,4)"), ("it is 3^4", "81"), ("It takes 3 1/2 cups.", "3.5")),
    *(("which gives 20 = x", "20"), ("so 9 * 2 = $18 every day", "18"), (r"and so $x = 7$. Good.", "7")),
    *(("thus\n\\[\n\\frac{3}{4}\n\\]", "0.75"), (r"it is 288 \pi", r"288\pi")),
    # numbers with units and currencies
    *(("The area is 50 cm^2.", "50"), ("The area is 50 cm\u00b2.", "50"), ("it goes 30 km/h", "30")),
    *(("it costs $600/month", "600"), (r"\boxed{35\text{ m}^2}", "35"), (r"it is 35\text{ m}^2", "35")),
    *((r"\boxed{35\text{ square meters}}", r"35\text{ m}^2"), (r"\boxed{5\$}", "5"), ("it costs 5$", "5")),
    *(("it costs 5 dollars", "5"), ("\\boxed{5\u20ac}", "5"), (r"\boxed{5 USD}", "5")),
    # digits in groups, decimal commas
    *(("it is 14{,}916", "14916"), (r"it is 12,\!000,\!023", "12000023"), (r"it is 2\,568\,332", "2568332")),
    *((r"\boxed{3,14}", "3.14"), ("about 3,14", "3.14"), (r"\boxed{0,125}", "0.125"), (r"\boxed{1.234,5}", "1234.5")),
    (r"\boxed{6.72\times 10^{-5}}", ".0000672"),
    # lists
    *((r"\boxed{2, 100}", "2, 100"), (r"\boxed{2,100}", "2, 100"), (r"\boxed{3,14}", "3, 14")),
    *((r"\boxed{2} and \boxed{1}", r"\{1, 2\}"), (r"\boxed{1} and \boxed{2}", "{1, 2}")),
    *((r"$x=\boxed{1}$ or $x=\boxed{2}$", "1,2"), (r"\boxed{5}, \boxed{5}", "5")),
    (r"\boxed{1-\sqrt{19}, 1+\sqrt{19}}", r"1 \pm \sqrt{19}"),
    # DAPO's last line
    *(("1, 2, 3.\nAnswer: 34", "34"), ("Answer: $34", "34"), ("Answer: $34$", "34"), ("**Answer:** 34.", "34")),
    *(("**Answer: 34**", "34"), ('Answer: "34"', "34"), ("Answer: \\(34\\)\nI hope that 17 helps", "34")),
    *(("Answer: 17\nAnswer: \\boxed{34}", "34"), ("\\boxed{17}\nAnswer: 34", "34")),
    *(("Answer: 17\n\\boxed{34}", "34"), ("Answer:\n34", "34"), ("Answer: The total is 34 dollars.", "34")),
    ("Answer: 17\n#### 34", "34"),
]
WRONG = [
    *((r"so it is \frac{1}{2}.", "2"), (r"so it is $\frac{1}{2}$.", "2"), ("The answer is 17/34.", "34")),
    *(("The answer is 34!", "34"), ("The answer is 34x", "34"), ("it is a_{34}", "34"), ("the point is (3, 4)", "4")),
    *(("it is 3^4", "4"), ("The area is 50 cm^2.", "2"), (r"it is 35\text{ m}^2", "2"), ("sqrt(2)", "2")),
    *(("f(3)", "3"), ("tax + 5", "5"), ("It takes 3 1/2 cups.", "3/2"), (r"it is 288 \pi", "288")),
    *(("thus $x > 5$", "5"), ("at 3:30", "30"), ("5 million", "5"), (r"\boxed{35\text{ cm}^2}", r"35\text{ m}^2")),
    *((r"\boxed{5\text{ dollars}}", r"5\text{ cents}"), ("it is 14{,}916", "916"), (r"\boxed{1,234}", "1.234")),
    *((r"\boxed{3,14}", "314"), (r"\boxed{3.14}", "3,14"), ("about 3,14", "14"), (r"\boxed{2, 100}", "2100")),
    *((r"\boxed{2, 100}", "2,100"), (r"\boxed{2100}", "2, 100"), (r"\boxed{1} and \boxed{2}", "2")),
    *((r"$x=\boxed{1}$ and $y=\boxed{2}$", "2, 1"), (r"\boxed{\{1,2\}}", "(1,2)"), (r"\boxed{(2,1)}", "1,2")),
    *((r"\boxed{(5,3)}", "(7,2)"), (r"\boxed{52}", "52_8"), (r"\boxed{6.7\times10^{-5}}", ".0000672")),
    *((r"\boxed{0.000003}", "1/300000"), ("Answer: 34\nAnswer: 17", "34"), ("Answer: 34\n\\boxed{17}", "34")),
    *(("Answer: 5 or 6", "6"), ("Answer: 17/34", "34")),
]


@pytest.mark.parametrize(("response", "truth"), RIGHT)
def test_right_answers(response, truth):
    assert is_correct(response, truth)


@pytest.mark.parametrize(("response", "truth"), WRONG)
def test_wrong_answers(response, truth):
    assert not is_correct(response, truth)


def spellings(number: int) -> list[str]:
    grouped = f"{number:,}"
    return [
        *(str(number), grouped, grouped.replace(",", "{,}"), grouped.replace(",", ",\\!"), grouped.replace(",", "\\,")),
        *(f"{number}.0", f"${grouped}", f"{number} dollars", f"{number}\\text{{ cm}}", f"\\frac{{{2 * number}}}{{2}}"),
    ]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 10**9), st.integers(1, 10**9), st.sampled_from(range(10)), st.booleans())
def test_a_number_equals_itself_in_every_spelling_and_no_other(number, other, spelling, same):
    shown = spellings(number)[spelling]
    truth = number if same else other
    for response in (rf"2, so \boxed{{{shown}}}", f"2 of 3\nAnswer: {shown}", f"2 of 3, so it is {shown}"):
        assert is_correct(response, str(truth)) == (number == truth)
