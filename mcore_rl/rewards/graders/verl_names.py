"""verl's scoring functions with its arguments and results, for users' files that call them; the verdicts are those of
the graders of this project. config.stand_ins says under which names they are imported.

Source: the interface of verl.utils.reward_score as of 2026.
"""

from __future__ import annotations

import re
from typing import Any

from mcore_rl.rewards.answers import last_box
from mcore_rl.rewards.graders.boxed import grade_geometry3k, grade_math_boxed, thinks_first
from mcore_rl.rewards.graders.catalogue import PURE, grader_of
from mcore_rl.rewards.graders.gsm8k import TAIL_CHARS, marked_number, plain, same_number
from mcore_rl.rewards.graders.math_dapo import MISSING_ANSWER, grade_math_dapo
from mcore_rl.rewards.graders.prime_math import final_answer, grade_prime_math
from mcore_rl.rewards.graders.search_qa import grade_search_qa, last_answer
from mcore_rl.rewards.math_grader import reference_answer, same_answer
from mcore_rl.types import Score

BOX_TAIL_CHARS = 100
"""In which a box must stand where nothing else counts as an answer (strict_box_verify)."""
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


def score_math_dapo(solution_str: str, ground_truth: Any, strict_box_verify: bool = False) -> dict[str, Any]:
    """Score 1 or -1, `acc` and `pred`; with strict_box_verify a box at the very end counts and nothing else."""
    if strict_box_verify:
        box = last_box(solution_str[-BOX_TAIL_CHARS:])
        right = box is not None and same_answer(box, reference_answer(ground_truth))
        return {"score": 1.0 if right else -1.0, "acc": right, "pred": MISSING_ANSWER if box is None else box}
    graded = grade_math_dapo(solution_str, ground_truth)
    return {"score": graded.reward, "acc": bool(graded.accuracy), **graded.parts}


def score_prime_math(model_output: str, ground_truth: Any) -> tuple[bool, bool, str]:
    """Whether the answer is right, whether it stands in a box, and the answer."""
    right = grade_prime_math(model_output, ground_truth).reward > 0
    return right, last_box(model_output) is not None, final_answer(model_output) or ""


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
