"""Equivalent spellings and near misses: repeating decimals, units, times of day, sets, choices."""

from __future__ import annotations

from fractions import Fraction
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.rewards.math_grader import is_correct, value_of
from mcore_rl.rewards.notation.choices import named_choice
from mcore_rl.rewards.numbers import expand_repeating

SAME = {
    "10^6": ["1,000,000", "1{,}000{,}000", r"1\,000\,000", "1 000 000", r"1\text{ million}", "1e6", "10**6"],
    "-10^6": ["-1,000,000"],
    "10^{-20}": ["1e-20", "10**-20", r"1.0 \times 10^{-20}", r"\frac{1}{10^{20}}", r"10^{-18}\%"],
    r"10^{-20}\%": ["10^{-22}", r"1\times10^{-20}\%"],
    "[0, 10^{-20}]": ["[0,1e-20]", r"[0, 1.0\times10^{-20}]"],
    r"(10^{-20}, \frac12)": ["(1e-20, 0.5)", "(1E-20,5e-1)"],
    r"6.02\times10^{23}": ["6.02x10^23", "6.02 x 10^{23}", "6.02e23"],
    "2^{10}": ["1,024", "1024"],
    "252": [r"{10 \choose 5}", r"\binom{10}{5}"],
    "1,000,000": ["10^6", "10^{6}", "1000000"],
    "5": [
        *(r"5\ \text{m/s}", r"5\,\mathrm{km}", r"5~\text{m/s}", r"5\ \mathrm{m}\cdot\mathrm{s}^{-1}", "5 m/s"),
        *(r"5\ \frac{\text{m}}{\text{s}}", r"5\text{ m s}^{-1}", r"5\ \text{m/s}^2", r"5\ \mathrm{cm}^2"),
        *(
            r"5\,\mathrm{m\,s^{-1}}",
            r"\text{5 m/s}",
            r"5\,\mu\mathrm{m}",
            r"5^\circ\mathrm{C}",
            r"5\ \Omega",
            r"5\ \text{k}\Omega",
        ),
    ],
    r"5\ \text{m/s}": [
        *("5", r"5\text{ meters per second}", r"5\,\mathrm{m}/\mathrm{s}", r"5\ \text{m}\cdot\text{s}^{-1}"),
    ],
    r"60\text{ mph}": [r"60\ \text{miles per hour}", "60"],
    "1/3": [
        *(r"0.\overline{3}", r"0.\dot{3}", "0.(3)", r"0.\bar{3}", r"0.\overline3", r"0.333\ldots", "0.333..."),
        *(r".\overline{3}", r"0.\overline{33}", "0.3\u0305", r"0.{\overline{3}}"),
    ],
    r"\frac{1}{7}": [r"0.\overline{142857}", r"0.\dot{1}4285\dot{7}", "0.(142857)"],
    r"\frac{11}{30}": [r"0.3\overline{6}", "0.3(6)"],
    r"33\frac{1}{3}\%": [r"33.\overline{3}\%", r"\frac{1}{3}"],
    "7:30": [
        *(r"7{:}30", r"7\!:\!30", "07:30", r"7{:}30\text{ p.m.}", r"\text{7:30 p.m.}", r"7\colon 30"),
        *(r"7\mathpunct{:}30", r"7\text{:}30"),
    ],
    r"7{:}30\text{ PM}": ["7:30", r"7{:}30\text{ p.m.}", "19:30"],
    "3:4": ["6:8", r"3\colon4", r"\frac{3}{4}"],
    r"\{1,2,3\}": [
        *(r"\{1,2\}\cup\{3\}", r"\{3\}\cup\{2,1\}", r"\{1\}\cup\{2\}\cup\{3\}", r"\{1,2\}\cup\{2,3\}"),
        *(r"\left\{1,2\right\} \cup \left\{3\right\}", r"\lbrace 1,2,3\rbrace", r"\{1,2\} \bigcup \{3\}"),
        *("\\{1\\} \u222a \\{2,3\\}", r"x\in\{1,2,3\}", r"\{1,2,3,4\} - \{4\}", r"\{1,2,3,4\}\backslash\{4\}"),
    ],
    r"\{1,2\}\cup\{3\}": [r"\{1,2,3\}", "1,2,3", r"\{3\}\cup\{1,2\}"],
    r"\{2\}": [r"\{1,2\}\cap\{2,3\}", r"\{1,2\}\setminus\{1\}", r"\{2\}\cup\emptyset"],
    r"\emptyset": [r"\varnothing", r"\{\}", r"\{1\}\cap\{2\}"],
    r"(1,3]": [r"(1,3)\cup\{3\}", r"(1,2]\cup(2,3]"],
    r"\mathbb{R}\setminus\{0\}": [
        *(r"(-\infty,0)\cup(0,\infty)", r"\mathbb{R}\backslash\{0\}", r"\mathbb R - \{0\}", r"\R\setminus\{0\}"),
        "\u211d \u2216 \\{0\\}",
    ],
    r"(-\infty,\infty)": [r"\mathbb R", r"\R", r"x\in\mathbb{R}", "(-\u221e, \u221e)"],
    "C": ["C: 5", "C. 5", "(C)", "C.", "C)", r"\text{(C)}", r"\textbf{(C)}\ 5", r"\text{Option C}"],
    r"\textbf{(C)}\ 5": ["C", "5", r"\text{(C)} 5"],
}
NEAR = {
    "10^6": ["1,000,001", "1,000,00", "100,000", "(1,000,000)", "1, 000, 000", "1,000", r"1\text{ billion}"],
    "1000": ["(1,000)", "1, 000", "1.000,5", "1,00"],
    r"5\ \text{m/s}": [
        *(r"5\ \text{km/h}", r"6\ \text{m/s}", r"5\ \text{m}", r"5\ \text{m/s}^2", r"-5\ \text{m/s}"),
        r"5\,\mathrm{m\,s^{-2}}",
    ],
    r"5\ \text{cm}^2": [r"5\ \text{cm}^3", r"5\ \text{m}^2", r"5\ \text{cm}"],
    "1/3": ["0.333", "0.3", r"0.\overline{4}", r"0.0\overline{3}", r"-0.\overline{3}", r"3.\overline{3}", "0.(34)"],
    r"0.\overline{3}": ["0.333", "3", "0.3", "0.33333"],
    "7:30": ["7:31", "8:30", "7.30", "730", "7/30", "7", "30", "30:7", r"\frac{7}{30}", "14:60", "(7, 30)"],
    r"7{:}30\text{ p.m.}": [r"7{:}30\text{ a.m.}", "7:31", "9:30"],
    "3:4": ["4:3", "3:5", "34", "3.4"],
    r"\{1,2\}\cup\{3\}": [
        *(r"\{1,2\}", r"\{1,2,4\}", "(1,2,3)", r"\{1,2\}\cap\{3\}", r"(1,2)\cup\{3\}", r"[1,2]\cup\{3\}", "[1,3]"),
        *(r"\{1,2,3,4\}", r"\{\{1,2\},3\}", r"\emptyset"),
    ],
    "10^{-20}": ["10^{-21}", "1e-21", "10**-21", "0", "10^{20}", "1.01e-20"],
    "[0, 10^{-20}]": ["[0,1e-21]", "[0,0]", "(0,1e-20]"],
    r"5\,\mu\mathrm{m}": [r"5\ \mathrm{m}", r"5\ \mathrm{mm}", r"5\ \mu\mathrm{s}"],
    r"5^\circ\mathrm{C}": [r"5^\circ\mathrm{F}", r"6^\circ\mathrm{C}", r"5\text{ K}"],
    r"\mathbb{R}\setminus\{0\}": [r"\R", r"\mathbb Z\setminus\{0\}", r"\R - \{1\}", r"\{0\}", "0", "(0, \u221e)"],
    r"\mathbb{R}": [r"\mathbb Z", r"\Q", "R", r"x\in\mathbb{N}"],
    "1-x": ["x-1"],
    r"2\cdot 3^x": ["2**3**x", "6^x"],
    "[1,2)": ["[1,2]", "(1,2)", "(1,2]", "[2,1)"],
    "(8,-2)": ["[8,-2]", "(-2,8)", r"\{8,-2\}"],
    "C": ["(D)", "D.", r"\textbf{(D)}\ 5", "c", "CD", "5"],
    r"\textbf{(C)}\ 5": ["(D) 5", "D", "6", "(C) 6"],
}
NAMED = [
    *("The answer is (C).", "The answer is C.", "The correct answer is C", "So the answer is option C.", "Option C"),
    *("The correct option is (C).", "The answer is **C**.", "The answer is **(C)**.", r"The answer is $\text{(C)}$."),
    *("The answer is $(C)$.", r"The answer is \textbf{(C)}.", "The answer is (A). No: the answer is (C)."),
    *("Hence (C) is correct.", "Answer: (C)", "**Answer: C**", "We find 42.\n\n(C)", "The answer is (C) 42."),
    "The answer is not (A). The answer is (C), not (B).",
]
TAGGED = [
    *(("<think>3 or 4</think><answer>18</answer>", "18"), ("<answer> 18 dollars </answer>", "18")),
    *(("<answer>\nThe total is 18.\n</answer> I hope that 17 helps.", "18"), ("<answer>Answer: 18</answer>", "18")),
    *(("<answer>17</answer> no: <answer>18", "18"), (r"\boxed{18} <answer>17</answer>", "18")),
    *(("<answer>(C)</answer>", "C"), ("<answer>C</answer>", "C"), ("<answer></answer> so 18", "18")),
]
UNNAMED = [
    *("The answer is A number.", "The answer is (x).\nSo 5", "The answer is (C)^2.", "The answer is not (C)."),
    *("(A) or (C)", "I think that (C) may be wrong.", "The answer is ABC.", "neither (B) nor (C) is correct."),
    *("The answer is (C) or (D).", "The answer is C, D.", "The answer is (C)/(D)."),
]


@pytest.mark.parametrize("reference", SAME)
def test_spellings_of_one_answer_are_right(reference: str) -> None:
    for answer in SAME[reference]:
        assert is_correct(rf"So \boxed{{{answer}}}.", reference), answer


@pytest.mark.parametrize("reference", NEAR)
def test_near_misses_are_wrong(reference: str) -> None:
    for answer in NEAR[reference]:
        assert not is_correct(rf"So \boxed{{{answer}}}.", reference), answer


@pytest.mark.parametrize("response", NAMED)
def test_a_named_choice_is_right_and_no_other_letter(response: str) -> None:
    for reference in ("{}", "({})", r"\text{{({})}}"):
        assert [letter for letter in "ABCDE" if is_correct(response, reference.format(letter))] == ["C"]


@pytest.mark.parametrize(("response", "reference"), TAGGED)
def test_extract_answer_reads_the_last_answer_tags(response: str, reference: str) -> None:
    assert is_correct(response, reference)
    assert not is_correct(response, "17")


@pytest.mark.parametrize("response", UNNAMED)
def test_a_sentence_without_a_choice_names_none(response: str) -> None:
    assert named_choice(response) is None
    assert not is_correct(response, "C")


def test_a_number_beside_a_named_choice_stays_the_answer() -> None:
    assert is_correct("The correct option is (C). So the value is 42.", "42")
    assert is_correct("The answer is (C) 42.", "42")
    assert not is_correct("The answer is (C) 42.", "43")


@pytest.mark.parametrize("shown", [r"0.\overline{3}", "0.(3)", "0.333...", r"$0.\dot{3}$", r"\(0.\overline{3}\)"])
def test_a_repeating_decimal_without_a_box_is_found(shown: str) -> None:
    assert is_correct(f"So the answer is {shown}.", "1/3")
    assert not is_correct(f"So the answer is {shown}.", "0.3")


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 99), st.text("0123456789", max_size=4), st.text("0123456789", min_size=1, max_size=6))
def test_repeating_decimals_are_the_sum_of_their_series(whole: int, fixed: str, period: str) -> None:
    expected = Fraction(f"{whole}.{fixed}0") + Fraction(int(period), 10 ** len(fixed) * (10 ** len(period) - 1))
    last = period[-1] if len(period) == 1 else rf"{period[1:-1]}\dot{{{period[-1]}}}"
    dotted = rf"\dot{{{period[0]}}}{last if len(period) > 1 else ''}"
    for shown in (rf"\overline{{{period}}}", f"({period})", dotted):
        assert value_of(f"{whole}.{fixed}{shown}") == expected, shown


@pytest.mark.parametrize(
    "text", ["3.14159...", "0.12...", "f(3)", "2(3)", "1.5", r"\overline{AB}", r"\bar{3}", "1.2.(3)"]
)
def test_texts_without_a_period_stay_as_they_are(text: str) -> None:
    assert expand_repeating(text) == text


def test_sets_by_operations_agree_with_pythons_sets() -> None:
    sets = [{1}, {1, 2}, {2, 3}, set()]
    operators = {r"\cup": set.union, r"\cap": set.intersection, r"\setminus": set.difference}
    shown = {frozenset(each): rf"\{{{','.join(map(str, sorted(each)))}\}}" for each in map(frozenset, sets)}
    for (one, other), (operator, combine) in ((p, o) for p in permutations(sets, 2) for o in operators.items()):
        answer = shown[frozenset(one)] + operator + shown[frozenset(other)]
        for reference, text in shown.items():
            assert is_correct(rf"\boxed{{{answer}}}", text) == (combine(one, other) == reference), (answer, text)
