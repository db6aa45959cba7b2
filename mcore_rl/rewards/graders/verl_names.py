"""Functions with the signatures of verl's scoring functions, for users' files that call them.

This project's graders decide the verdicts. config.stand_ins lists the import names.

Source: the interface of verl.utils.reward_score as of 2026.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from mcore_rl.rewards.answers import last_box
from mcore_rl.rewards.graders import data_sets
from mcore_rl.rewards.graders.catalogue import PURE, grader_of
from mcore_rl.rewards.graders.verl_helpers import BOX_TAIL_CHARS
from mcore_rl.rewards.math_grader import is_correct, reference_answer, same_answer

_NUMBER = re.compile(r"-?[0-9.,]+")


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: object, extra_info: object = None, **kwargs: object
) -> float | dict[str, object]:
    """Score a response with its data source's grader; returns a number or, for math_dapo, a dict.

    Raises: NotImplementedError for a data source without a grader, and for programs, which run in the sandbox only.
    """
    name = grader_of(data_source, {})
    if name is None:
        raise NotImplementedError(f"data_source {data_source} has no grader")
    if name == "math_dapo":
        return score_math_dapo(solution_str, ground_truth)
    if name not in PURE:
        raise NotImplementedError(f"{data_source} is graded by running code: set reward.function=by_data_source")
    return PURE[name](solution_str, ground_truth).reward


def extract_gsm8k(solution_str: str, method: str = "strict") -> str | None:
    """Return the last `#### number` (method="strict") or the last number (method="flexible"), or None."""
    if method == "strict":
        marked = data_sets.marked_number(solution_str)
        return None if marked is None else data_sets.plain(marked)
    if method != "flexible":
        raise ValueError(f"method={method} must be strict or flexible")
    numbers = [number for number in _NUMBER.findall(solution_str[-data_sets.TAIL_CHARS :]) if number.strip(".,-")]
    return numbers[-1] if numbers else None


def score_gsm8k(
    solution_str: str, ground_truth: object, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """Return `score` for the correct answer, `format_score` for another answer, 0 without an answer."""
    answer = extract_gsm8k(solution_str, method)
    if answer is None:
        return 0.0
    return score if data_sets.same_number(answer, ground_truth) else format_score


def score_math(solution_str: str, ground_truth: object) -> float:
    """Return 1 if the last box has the correct answer, else 0."""
    return data_sets.grade_math_boxed(solution_str, ground_truth).reward


def score_math_verify(model_output: str, ground_truth: object, timeout_score: float = 0.0) -> float:
    """Return 1 for the correct answer in any notation, else 0. timeout_score is unused: a timeout counts 0."""
    return float(is_correct(model_output, ground_truth))


def score_math_batch(
    data_sources: object, solution_strs: Sequence[str], ground_truths: Sequence[object], extra_infos: object = None
) -> list[float]:
    """Return the score_math of each response."""
    return [score_math(*pair) for pair in zip(solution_strs, ground_truths, strict=True)]


def score_math_dapo(
    solution_str: str,
    ground_truth: object,
    strict_box_verify: bool = False,
    pause_tokens_index: list[int] | None = None,
) -> dict[str, object]:
    """Return `score` (1 or -1), `acc` and `pred`. With strict_box_verify, only a box near the end counts."""
    if strict_box_verify:
        start = -BOX_TAIL_CHARS if pause_tokens_index is None else pause_tokens_index[-1] - BOX_TAIL_CHARS
        box = last_box(solution_str[start:])
        right = box is not None and same_answer(box, reference_answer(ground_truth))
        return {"score": 1.0 if right else -1.0, "acc": right, "pred": data_sets.MISSING_ANSWER if box is None else box}
    graded = data_sets.grade_math_dapo(solution_str, ground_truth)
    return {"score": graded.reward, "acc": bool(graded.accuracy), **graded.parts}


def score_prime_math(model_output: str, ground_truth: object) -> tuple[bool, bool, str]:
    """Return whether the answer is correct, whether it is in a box, and the answer."""
    right = data_sets.grade_prime_math(model_output, ground_truth).reward > 0
    return right, last_box(model_output) is not None, data_sets.final_answer(model_output) or ""


def match_answer(response: str) -> tuple[bool, str]:
    """Return whether a response has a box or a phrase such as `the answer is`, and the answer."""
    answer = data_sets.final_answer(response)
    return answer is not None, response if answer is None else answer


def grade_answer(given_answer: str | None, ground_truth: str) -> bool:
    """Return whether two answers are equal by rewards.math_grader."""
    return given_answer is not None and same_answer(given_answer, ground_truth)


def math_equal(prediction: str, reference: str, *options: object, **more: object) -> bool:
    """Return whether two answers are equal, or numbers within a relative 1e-4. verl's other options have no effect."""
    return bool(data_sets.grade_prime_math(rf"\boxed{{{prediction}}}", reference).accuracy)


def format_geometry3k(predict_str: str) -> float:
    """Return 1 if `<think>...</think>` precedes the box, else 0."""
    return float(data_sets.thinks_first(predict_str))


def accuracy_geometry3k(predict_str: str, ground_truth: object, use_boxed: bool = True) -> float:
    """Return 1 for the correct answer, in a box or (use_boxed=False) as the whole text, else 0."""
    return score_geometry3k(predict_str, ground_truth, use_boxed, format_score=0.0)


def score_geometry3k(
    predict_str: str, ground_truth: object, use_boxed: bool = True, format_score: float = 0.1
) -> float:
    """Return 1 - format_score for the correct answer plus format_score for `<think>...</think>` before the box."""
    if use_boxed:
        right = data_sets.grade_geometry3k(predict_str, ground_truth).accuracy
    else:
        right = float(same_answer(predict_str, reference_answer(ground_truth)))
    return (1.0 - format_score) * right + format_score * data_sets.thinks_first(predict_str)


def score_search_qa(
    solution_str: str, ground_truth: object, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """Return `score` for the correct answer (a quarter with too many tags), `format_score` for another, 0 for none."""
    graded = data_sets.grade_search_qa(solution_str, ground_truth)
    if data_sets.last_answer(solution_str) is None:
        return 0.0
    return score * graded.reward if graded.accuracy else format_score
