"""Functions with verl's names: arguments and results."""

from __future__ import annotations

from typing import Any

import pytest

from mcore_rl.rewards.graders.verl_names import (
    default_compute_score,
    extract_gsm8k,
    score_geometry3k,
    score_gsm8k,
    score_math,
    score_math_dapo,
    score_prime_math,
    score_search_qa,
)


@pytest.mark.parametrize(
    ("response", "method", "score"),
    [
        *(("so #### 1,042", "strict", 2.0), ("so #### 41", "strict", 0.1), ("so 1042", "strict", 0.0)),
        *(("so 1042, I think.", "flexible", 2.0), ("first 1042, then 7", "flexible", 0.1)),
        ("nothing .", "flexible", 0.0),
    ],
)
def test_gsm8k_tells_a_wrong_answer_from_none(response: str, method: str, score: float) -> None:
    assert score_gsm8k(response, "1042", method=method, format_score=0.1, score=2.0) == score


def test_gsm8k_gives_the_answer_without_commas() -> None:
    assert extract_gsm8k("#### 1,042") == "1042"
    with pytest.raises(ValueError, match="strict or flexible"):
        extract_gsm8k("1", "loose")


def test_math_dapo_is_a_dict_whose_acc_is_a_bool() -> None:
    assert score_math_dapo("Answer: \\frac{2}{4}", "0.5") == {"score": 1.0, "acc": True, "pred": "\\frac{2}{4}"}
    assert score_math_dapo("Answer: 7", "0.5") == {"score": -1.0, "acc": False, "pred": "7"}
    boxed = "Answer: 7. \\boxed{0.5}"
    assert score_math_dapo(boxed, "0.5", strict_box_verify=True) == {"score": 1.0, "acc": True, "pred": "0.5"}
    far = boxed + " " * 100
    assert score_math_dapo(far, "0.5", strict_box_verify=True) == {"score": -1.0, "acc": False, "pred": "[INVALID]"}


def test_geometry3k_weighs_the_form() -> None:
    right = "<think>a</think> \\boxed{3}"
    assert score_geometry3k(right, "3") == pytest.approx(1.0)
    assert score_geometry3k("\\boxed{3}", "3", format_score=0.25) == pytest.approx(0.75)
    assert score_geometry3k("3", "3", use_boxed=False) == pytest.approx(0.9)


def test_search_answers_have_a_score_of_form() -> None:
    truth = {"target": ["Paris"]}
    assert score_search_qa("<answer>paris.</answer>", truth, score=2.0) == 2.0
    assert score_search_qa("<answer>paris</answer>" * 11, truth, score=2.0) == 0.5
    assert score_search_qa("<answer>Rome</answer>", truth, format_score=0.2) == 0.2
    assert score_search_qa("Paris", truth, format_score=0.2) == 0.0


def test_prime_math_says_whether_there_was_a_box() -> None:
    assert score_prime_math("so \\boxed{1/2}", "0.5") == (True, True, "1/2")
    assert score_prime_math("The answer is 3.", "0.5") == (False, False, "3")


@pytest.mark.parametrize(
    ("source", "response", "truth", "result"),
    [
        ("openai/gsm8k", "#### 3", "3", 1.0),
        ("lighteval/MATH", "\\boxed{3}", "3", 1.0),
        ("aime2024", "Answer: 3", "3", {"score": 1.0, "acc": True, "pred": "3"}),
        ("hiyouga/geometry3k", "\\boxed{3}", "3", 0.9),
        ("searchR1_nq", "<answer>x</answer>", {"target": "y"}, 0.0),
    ],
)
def test_a_data_source_names_the_grader(source: str, response: str, truth: Any, result: Any) -> None:
    assert default_compute_score(source, response, truth, extra_info={}, sandbox_fusion_url=None) == result
    if source == "lighteval/MATH":
        assert score_math(response, truth) == result


def test_unknown_sources_and_programs_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="my/data"):
        default_compute_score("my/data", "", "")
    with pytest.raises(NotImplementedError, match="by_data_source"):
        default_compute_score("taco", "", "")
