"""Code graders: program extraction, inputs, and scores. The programs are trusted."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mcore_rl.rewards.graders.code import extract_program, grade_asserts, grade_outputs, same_output
from mcore_rl.sandbox.interface import Outcome
from tests.unit.rewards.trusted import fenced, run_trusted

DOUBLE = fenced("print(2 * int(input()))")
DOUBLES = {"inputs": ["1\n", "20\n", "-3\n"], "outputs": ["2\n", "40", "-6\n"]}
ADD = fenced("def add(a, b):\n    return a + b")
HUMANEVAL = {
    "prompt": 'def add(a, b):\n    """The sum."""\n',
    "test": "def check(candidate):\n    assert candidate(2, 3) == 5\n    assert candidate(-1, 1) == 0\n",
    "entry_point": "add",
}
MBPP = {
    "test_list": ["assert add(2, 3) == 5", "assert math.isclose(add(0.1, 0.2), 0.3)"],
    "test_imports": ["import math"],
}


def recorded(programs):
    """Return a runner of trusted programs that adds them to `programs`."""
    return lambda program: programs.append(program) or run_trusted(program)


def outputs(response, truth, run=run_trusted):
    return grade_outputs(response, truth, run, 30.0)


def asserts(response, truth):
    return grade_asserts(response, truth, run_trusted, 30.0).reward


@pytest.mark.parametrize(
    ("response", "share"),
    [
        (DOUBLE, 1.0),
        (fenced("print(int(input()) ** 2 * 2)"), 1 / 3),
        (fenced("print(abs(2 * int(input())))"), 2 / 3),
        (fenced("print('2')"), 1 / 3),
        (fenced("print(2 * int(input()), 'is the answer')"), 0.0),
        (fenced("print(2 * int(input())); raise SystemExit(1)"), 0.0),  # non-zero exit code
        (fenced("print(2 * int(input())"), 0.0),
        ("print(2 * int(input()))", 0.0),
    ],
)
def test_the_score_is_the_share_of_tests_that_pass(response, share):
    score = outputs(response, DOUBLES)
    assert (score.reward, score.accuracy) == (pytest.approx(share), float(share == 1))
    assert score.parts == {"tests_passed": round(3 * share), "tests": 3.0}


def test_tests_come_as_verl_writes_them():
    for truth in (json.dumps(DOUBLES), {key: np.array(value, object) for key, value in DOUBLES.items()}):
        assert outputs(DOUBLE, truth).reward == 1.0
    many = {"inputs": [f"{n}\n" for n in range(12)], "outputs": [str(2 * n) for n in range(10)] + ["wrong"] * 2}
    programs = []
    assert outputs(DOUBLE, many, recorded(programs)).parts["tests"] == 10
    assert [program.stdin for program in programs] == many["inputs"][:10]


@pytest.mark.parametrize(
    ("program", "expected", "passes"),
    [
        ("def gap(a, b):\n    return b - a", [3], True),  # APPS wraps results
        ("def gap(a, b):\n    return b - a", "3", True),
        ("def gap(a, b):\n    return a - b", 3, False),
        ("def gap(a, b):\n    print(3)", 3, False),  # printed output is not a result
        ("def gap(a, b):\n    return (b, a)", [[7, 4]], True),  # JSON has no tuples
        ("def other(a, b):\n    return b - a", 3, False),
        ("def gap(a):\n    return 3", 3, False),
    ],
)
def test_a_function_is_called_with_json_arguments(program, expected, passes):
    truth = {"fn_name": "gap", "inputs": [[4, 7]], "outputs": [expected]}
    assert outputs(fenced(program), truth).reward == float(passes)


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("1 2 \n3", "1 2\n3\n\n", True),
        ("1 2 3", "1 2\n3", False),
        ("0.333333333", "0.33333333333", True),
        ("0.3333", "0.33333333", False),
        ("1.0", "1", True),
        ("10000001", "10000002", False),  # integers are compared exactly
        ("yes", "YES", False),
        ("a 1.5", "a 1.50", True),
        ("a 1.5 b", "a 1.50", False),
        ("", "", True),
        ("x", "", False),
        ("nan.", "0.0", False),
    ],
)
def test_outputs_are_compared_line_by_line(printed, expected, same):
    assert same_output(printed, expected) is same


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        ("def add(a, b):\n    return a - b", HUMANEVAL),
        ("def add(a, b):\n    return 5", HUMANEVAL),
        ("import sys\nsys.exit(0)\ndef add(a, b):\n    return a + b", HUMANEVAL),  # exits before an assertion fails
        ("import os\ndef add(a, b):\n    os._exit(0)", HUMANEVAL),
        ("def add(a, b):\n    raise SystemExit(0)", HUMANEVAL),
        ("def add(a, b):\n    return round(a) + round(b)", MBPP),
        ("def plus(a, b):\n    return a + b", MBPP),
        ("print('passed')\nquit()", MBPP),
    ],
)
def test_asserts_that_fail_or_are_not_reached_score_nothing(response, truth):
    assert asserts(fenced(response), truth) == 0.0


def test_asserts_may_be_json_or_arrays():
    assert asserts(ADD, json.dumps(HUMANEVAL)) == 1.0
    assert asserts(ADD, {**MBPP, "test_list": np.array(MBPP["test_list"], object)}) == 1.0
    assert asserts("no code at all", HUMANEVAL) == 0.0


def test_all_tests_share_the_time_of_a_response():
    programs = []
    score = grade_outputs(fenced("import time\ntime.sleep(60)"), DOUBLES, recorded(programs), 1.0)
    assert (score.reward, score.parts["tests"]) == (0.0, 3.0)
    assert sum(program.seconds for program in programs) <= 1.0


def test_a_sandbox_that_fails_is_not_the_programs_fault():
    def run(program):
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        outputs(DOUBLE, DOUBLES, run)


def test_what_was_printed_before_the_time_was_over_does_not_count():
    ends = iter([("exit", "2"), ("timeout", "40"), ("exit", "-6")])

    def run(program):
        why, printed = next(ends)
        return Outcome(why, 0, printed, "", 0.0)

    assert outputs(DOUBLE, DOUBLES, run).reward == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("grade", "truth"),
    [
        (grade_outputs, {"inputs": ["1"]}),
        (grade_outputs, {"inputs": ["1"], "outputs": []}),
        (grade_outputs, {"inputs": [], "outputs": []}),
        (grade_outputs, "[1]"),
        (grade_outputs, "no JSON"),
        (grade_asserts, {"test": "def check(c): pass"}),
        (grade_asserts, {"test_list": []}),
    ],
)
def test_a_ground_truth_without_tests_is_an_error_and_no_verdict(grade, truth):
    with pytest.raises(ValueError, match=r"ground truth|JSON|Expecting"):
        grade(ADD, truth, run_trusted, 5.0)


def test_extract_program_returns_the_last_python_or_other_block():
    assert extract_program("First try:\n```python\na\n```\nBetter:\n```python\nb\n```") == "b\n"
    assert extract_program("```python\na\n```\nIt prints:\n```\n2\n```") == "a\n"
    assert extract_program("```python\na\n") == "a\n"  # cut off after the program
    assert extract_program("```cpp\nint x;\n```") == "int x;\n"
    assert extract_program("```py\na\n```\n```bash\nb\n```") == "a\n"
    assert extract_program("Fences are ``` here:\n```Python\na\n```") == "a\n"
    assert extract_program("") is None
    assert extract_program("none, not even `this` or ```that```") is None


def test_tests_that_cannot_be_hidden_are_an_error_and_no_verdict():
    def run(program):
        return Outcome("exit", 0, f"unprotected {json.loads(program.stdin)['secret']}\n", "", 0.0)

    with pytest.raises(RuntimeError, match=r"sandbox\.python cannot hide"):
        grade_asserts(ADD, MBPP, run, 5.0)
