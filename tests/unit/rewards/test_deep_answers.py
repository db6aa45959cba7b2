"""Deeply nested answers and huge numbers are wrong; no grader raises an error or takes long."""

from __future__ import annotations

import time

import pytest

from mcore_rl.rewards.graders.catalogue import PURE
from mcore_rl.rewards.graders.programs.comparison import same_output, same_result
from mcore_rl.rewards.math_grader import is_correct
from mcore_rl.rollout.tools.interface import as_text

DEPTH = 20_000
SHORT = 300
NESTED = [
    *(("(", ")"), ("[", "]"), ("{", "}"), (r"\{", r"\}"), (r"\sqrt{", "}"), (r"\frac{1}{", "}"), (r"\text{", "}")),
    *((r"\left(", r"\right)"), ("x^", ""), ("2^{", "}"), ("-", ""), ("|", ""), ("1+", ""), ("!", ""), ("$", "")),
    *((r"\{1\}\cup", ""), ("1,", ""), ("7:30", ""), ("5 m/", ""), (" million", "")),
]
HUGE = ["9" * DEPTH, "1e" + "9" * 300, "10^{" + "9" * 300 + "}", "9" * 300 + "!", r"0.\overline{" + "3" * 300 + "}"]
REFERENCES = ["1", r"\{1, 2\}", "(C)", "7:30", r"5\ \text{m/s}"]


@pytest.mark.parametrize(("opening", "closing"), NESTED)
def test_deeply_nested_answers_are_wrong_in_a_short_time(opening: str, closing: str) -> None:
    started = time.process_time()
    for depth in (SHORT, DEPTH):
        for text in (opening * depth + "6" + closing * depth, opening * depth):
            assert not any(is_correct(rf"\boxed{{{text}}}", reference) for reference in REFERENCES)
            assert not is_correct(f"Answer: {text}", "5")
            for name, grade in PURE.items():
                truth = {"target": "5"} if name == "search_qa" else "5"
                assert grade(f"#### {text} Answer: {text} <answer>{text}</answer>", truth).accuracy == 0.0
    assert time.process_time() - started < 20.0


@pytest.mark.parametrize("text", HUGE, ids=range(len(HUGE)))
def test_huge_numbers_are_wrong(text: str) -> None:
    assert not any(is_correct(rf"\boxed{{{text}}}", reference) for reference in REFERENCES)
    assert not is_correct(rf"\boxed{{{text}}}", f"{text} + 1")


@pytest.mark.parametrize("printed", ["[" * DEPTH, "[" * DEPTH + "]" * DEPTH, "9" * 5000, "9" * 400, '{"a":' * DEPTH])
def test_printed_results_of_any_depth_and_size_are_compared(printed: str) -> None:
    for expected in (1, 1.5, [1], "[1]"):
        assert not same_result(printed, expected)
    assert not same_output(printed, "1.5")


def test_a_tools_deep_or_huge_answer_becomes_a_message() -> None:
    deep: list[object] = []
    for _ in range(DEPTH):
        deep = [deep]
    assert as_text(deep) == "the tool returned a list that is too large or too deeply nested to be shown"
    assert "a int that is too large" in as_text(10**5000)
    while deep:
        deep = deep.pop()  # type: ignore[assignment]
