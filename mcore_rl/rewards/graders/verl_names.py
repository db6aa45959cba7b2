"""verl's scoring functions with its arguments and results, for users' files that call them; the verdicts are those of
the graders of this project. config.stand_ins says under which names they are imported.

Source: the interface of verl.utils.reward_score as of 2026.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from mcore_rl.rewards.answers import last_box
from mcore_rl.rewards.graders.boxed import grade_geometry3k, grade_math_boxed, thinks_first
from mcore_rl.rewards.graders.catalogue import PURE, grader_of
from mcore_rl.rewards.graders.gsm8k import TAIL_CHARS, marked_number, plain, same_number
from mcore_rl.rewards.graders.math_dapo import MISSING_ANSWER, grade_math_dapo
from mcore_rl.rewards.graders.prime_math import final_answer, grade_prime_math
from mcore_rl.rewards.graders.search_qa import grade_search_qa, last_answer
from mcore_rl.rewards.graders.verl.minerva import BOX_TAIL_CHARS
from mcore_rl.rewards.math_grader import is_correct, reference_answer, same_answer
from mcore_rl.types import Score

_NUMBER = re.compile(r"-?[0-9.,]+")


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> float | dict[str, Any]:
    """The score by the data source's grader: a dict where the grader says more than a number.

    Raises: NotImplementedError for a data source without a grader, and for programs, which run in the sandbox only.
    """
    name = grader_of(data_source, {})
    if name is None:
        raise NotImplementedError(f"no grader is known for data_source {data_source}")
    if name == "math_dapo":
        return score_math_dapo(solution_str, ground_truth)
    if name not in PURE:
        raise NotImplementedError(f"{data_source} is graded by running code: set reward.function=by_data_source")
    return PURE[name](solution_str, ground_truth).reward


def extract_gsm8k(solution_str: str, method: str = "strict") -> str | None:
    """The answer: strict, the last `#### number`; flexible, the last number of any kind."""
    if method == "strict":
        marked = marked_number(solution_str)
        return None if marked is None else plain(marked)
    if method != "flexible":
        raise ValueError(f"method={method} must be strict or flexible")
    numbers = [number for number in _NUMBER.findall(solution_str[-TAIL_CHARS:]) if number.strip(".,-")]
    return numbers[-1] if numbers else None


def score_gsm8k(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` for the right answer, `format_score` for another one, 0 for none."""
    answer = extract_gsm8k(solution_str, method)
    if answer is None:
        return 0.0
    return score if same_number(answer, ground_truth) else format_score


def score_math(solution_str: str, ground_truth: Any) -> float:
    """1 or 0, of the last box."""
    return grade_math_boxed(solution_str, ground_truth).reward


def score_math_verify(model_output: str, ground_truth: Any, timeout_score: float = 0.0) -> float:
    """1 or 0, of the answer wherever it stands. timeout_score is not used: a comparison without end counts 0."""
    return float(is_correct(model_output, ground_truth))


def score_math_batch(
    data_sources: Sequence[str], solution_strs: Sequence[str], ground_truths: Sequence[Any], extra_infos: Any = None
) -> list[float]:
    """1 or 0 for each response, of the last box."""
    return [score_math(*pair) for pair in zip(solution_strs, ground_truths, strict=True)]


def score_math_dapo(
    solution_str: str,
    ground_truth: Any,
    strict_box_verify: bool = False,
    pause_tokens_index: list[int] | None = None,
) -> dict[str, Any]:
    """Score 1 or -1, `acc` and `pred`; with strict_box_verify a box at the very end counts and nothing else."""
    if strict_box_verify:
        start = -BOX_TAIL_CHARS if pause_tokens_index is None else pause_tokens_index[-1] - BOX_TAIL_CHARS
        box = last_box(solution_str[start:])
        right = box is not None and same_answer(box, reference_answer(ground_truth))
        return {"score": 1.0 if right else -1.0, "acc": right, "pred": MISSING_ANSWER if box is None else box}
    graded = grade_math_dapo(solution_str, ground_truth)
    return {"score": graded.reward, "acc": bool(graded.accuracy), **graded.parts}


def score_prime_math(model_output: str, ground_truth: Any) -> tuple[bool, bool, str]:
    """Whether the answer is right, whether it stands in a box, and the answer."""
    right = grade_prime_math(model_output, ground_truth).reward > 0
    return right, last_box(model_output) is not None, final_answer(model_output) or ""


def match_answer(response: str) -> tuple[bool, str]:
    """Whether a response has a box or a phrase such as `the answer is`, and the answer."""
    answer = final_answer(response)
    return answer is not None, response if answer is None else answer


def grade_answer(given_answer: str | None, ground_truth: str) -> bool:
    """Whether two answers are the same by rewards.math_grader."""
    return given_answer is not None and same_answer(given_answer, ground_truth)


def math_equal(prediction: str, reference: str, *options: object, **more: object) -> bool:
    """Whether two answers are the same, or numbers within 1e-4. verl's further options are not used."""
    return bool(grade_prime_math(rf"\boxed{{{prediction}}}", reference).accuracy)


def format_geometry3k(predict_str: str) -> float:
    """1 for `<think>...</think>` before the box, else 0."""
    return float(thinks_first(predict_str))


def accuracy_geometry3k(predict_str: str, ground_truth: Any, use_boxed: bool = True) -> float:
    """1 for the right answer, in a box or as the whole text, else 0."""
    return score_geometry3k(predict_str, ground_truth, use_boxed, format_score=0.0)


def score_geometry3k(predict_str: str, ground_truth: Any, use_boxed: bool = True, format_score: float = 0.1) -> float:
    """1 - format_score for the answer, format_score for `<think>` before the box."""
    if use_boxed:
        right = grade_geometry3k(predict_str, ground_truth).accuracy
    else:
        right = float(same_answer(predict_str, reference_answer(ground_truth)))
    return (1.0 - format_score) * right + format_score * thinks_first(predict_str)


def score_search_qa(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` for the right answer, a quarter of it after too many guesses, `format_score` for another, 0 for none."""
    graded: Score = grade_search_qa(solution_str, ground_truth)
    if last_answer(solution_str) is None:
        return 0.0
    return score * graded.reward if graded.accuracy else format_score
