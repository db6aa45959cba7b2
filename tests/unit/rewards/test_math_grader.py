"""The math grader on difficult answers, compared with math-verify, and (if present) on all of GSM8K's references."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from math_verify import parse, verify

from mcore_rl.rewards.answers import extract_answer, last_boxed
from mcore_rl.rewards.formulas import last_formula
from mcore_rl.rewards.math_grader import is_correct, reference_answer, same_answer
from mcore_rl.rewards.numbers import parse_number

SHARED = Path(__file__).parents[3].parent / "shared" / "data"

EQUAL = [
    *(("72", "72.0"), ("72.", "72"), ("1,234", "1234"), ("1,234,567.50", "1234567.5"), ("$72", "72")),
    *((r"\$1{,}234.50", "1234.5"), ("10\\,000", "10000"), ("10 000", "10000"), ("+7", "7"), ("\u22127", "-7")),
    *(("-0", "0"), (".5", "0.5"), ("007", "7"), ("50%", "50"), (r"50\%", "0.5"), ("0.5", r"50\%")),
    *(("72 dollars", "72"), (r"10\text{ cm}", "10"), ("She has 72 apples.", "72"), (r"90^\circ", "90")),
    *(("x = 5", "5"), (r"\(5\)", "5"), ("$$5$$", "5"), ("**5**", "5"), ("1/2", "0.5"), (r"\frac12", "1/2")),
    *((r"\dfrac{1}{2}", r"\frac{1}{2}"), (r"-\frac{1}{2}", r"\frac{-1}{2}"), ("0.333333", "1/3")),
    *((r"\text{Evelyn}", "evelyn"), ("(C)", r"\text{(C)}")),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    # decided by math-verify
    *((r"3\sqrt{13}", r"\sqrt{117}"), ("x^2+2x+1", "(x+1)^2"), ("-5i + 6", "6 - 5i"), ("10^{5}", "100000")),
    *((r"1\frac{1}{2}", "1.5"), ("5, 3, 1", "1,3,5")),
]
DIFFERENT = [
    *(("73", "72"), ("-72", "72"), ("7.2", "72"), ("7 2", "72"), ("1,23", "123"), ("0.33", "1/3")),
    *(("5 million", "5"), ("two dozen and 5", "5"), ("minus 5", "5"), ("5 or 6", "5"), ("2 pi", "2")),
    *((r"\sqrt{2}", "2"), ("2x", "2"), ("", "5"), ("unknown", "5"), ("3/0", "3"), ("(2,1)", "(1,2)"), ("p-q", "q-p")),
    *(("B", "A"), ("x", "X"), (r"\frac{1}{3}", r"\frac{1}{2}"), ("50%", "5"), ("9^{9^{9^{9}}}", "9")),
    *(("99999999!", "1"), ("10^{99999999}", "1"), ("__import__('os').system('true')", "0")),
]


@pytest.mark.parametrize(("answer", "reference"), EQUAL)
def test_equal_answers(answer, reference):
    assert same_answer(answer, reference)


@pytest.mark.parametrize(("answer", "reference"), DIFFERENT)
def test_different_answers(answer, reference):
    assert not same_answer(answer, reference)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"First \boxed{1}, no: \boxed{2}. #### 3 and 4", "2"),
        *((r"so \boxed{\frac{1}{\sqrt{2}}} follows, 7", r"\frac{1}{\sqrt{2}}"), (r"\boxed{\{1, 2\}}", r"\{1, 2\}")),
        *((r"\boxed{\boxed{3}}", "3"), (r"\boxed 5.", "5"), (r"\fbox{6}", "6")),
        *((r"\boxed{8} and then \boxed{9", "8"), ("work 1\n#### 72\n", "72")),
        *(("#### 5\nno, wait\n#### $1,000 \nso 3", "$1,000"), ("5 of 7 #### ", "7")),
        *(("so he pays $1,234.50 in total.", "1,234.50"), ("from 7-3", "7-3"), ("it is -3.", "-3")),
        *(("a loss of -$40", "-40"), ("about 3/4 of H2O", "3/4"), ("1, 3, 5", "5"), ("It grew by 12%", "12%")),
        *(("no idea", None), ("", None)),
    ],
)
def test_extraction_order(response, answer):
    assert extract_answer(response) == answer


def test_unclosed_boxes_in_long_response_are_read_in_linear_time():
    assert last_boxed(r"\boxed{" * 200_000) is None
    assert last_formula("1" * 200_000 + "\n" + "x" * 200_000) is not None
    assert not is_correct("(" * 100_000 + "1" * 100_000, "5")


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        *(("Half of 144 is <<144/2=72>>72.\n#### 72", "72"), (r"We get $x = \boxed{\frac{3}{4}}$.", r"\frac{3}{4}")),
        *(("72", "72"), (72, "72"), (0.5, "0.5"), (r"x^2 + 1", "x^2 + 1"), ("The answer is 72", "72")),
    ],
)
def test_reference_answers_of_every_form(truth, answer):
    assert reference_answer(truth) == answer


@settings(max_examples=60, deadline=None)
@given(st.fractions(-999, 999, max_denominator=40), st.fractions(-999, 999, max_denominator=40), st.booleans())
def test_exact_numbers_agree_with_math_verify(a, b, same):
    b = a if same else b
    shown = [f"\\frac{{{x.numerator}}}{{{x.denominator}}}" if x.denominator > 1 else str(x.numerator) for x in (a, b)]
    gold, given_ = (parse(f"${text}$", parsing_timeout=None) for text in shown)
    assert same_answer(shown[1], shown[0]) == verify(gold, given_, timeout_seconds=None) == (a == b)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="0123456789.,-+/eE$%\\{}^ x", max_size=30))
def test_no_text_makes_the_number_parser_raise(text):
    value = parse_number(text)
    assert value is None or isinstance(value, Fraction)
    extract_answer(text)


def gsm8k():
    for name in ("train.jsonl", "test.jsonl"):
        path = SHARED / "gsm8k" / name
        if path.is_file():
            yield from (json.loads(line)["answer"] for line in path.read_text().splitlines())


def test_every_gsm8k_reference_is_right_and_its_neighbour_wrong():
    answers = list(gsm8k())
    if not answers:
        pytest.skip("GSM8K is not beside the checkout")
    for solution in answers:
        number = solution.rpartition("####")[2].strip()
        right = number.replace(",", "")
        assert is_correct(solution, solution)
        assert is_correct(rf"So the answer is $\boxed{{{number}}}$.", solution)
        assert is_correct(f"Therefore she has {right}.", number)
        for wrong in (str(int(right) + 1), right + "0" if right != "0" else "5", str(-int(right) - 1)):
            assert not is_correct(f"#### {wrong}", solution)


def test_math500_references_equal_themselves_in_other_clothes():
    path = SHARED / "math" / "math500.json"
    if not path.is_file():
        pytest.skip("MATH-500 is not beside the checkout")
    rows = json.loads(path.read_text())
    assert len(rows) == 500
    for row in rows:
        answer = row["answer"]
        clothed = re.sub(r",(?!\\!|[0-9]{3})", ", ", answer.replace(r"\frac", r"\dfrac"))
        assert is_correct(rf"We conclude that $$\boxed{{ {clothed} }}$$. Check: 12345.", answer)
        assert not is_correct(r"\boxed{-98765}", answer)
