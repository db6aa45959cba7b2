"""Checks of short answers, with the names of verl.utils.reward_score.search_r1_like_qa_em.

Source: Jin et al., arXiv 2503.09516. The normal form is search_qa.normal_form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mcore_rl.rewards.graders.search_qa import last_answer, normal_form


def em_check(prediction: str, golden_answers: str | Sequence[str]) -> int:
    """Return 1 if prediction and any answer have the same normal form, else 0."""
    return int(normal_form(prediction) in _normal_forms(golden_answers))


def subem_check(prediction: str, golden_answers: str | Sequence[str]) -> int:
    """Return 1 if the prediction's normal form contains the normal form of any answer, else 0."""
    text = normal_form(prediction)
    return int(any(answer in text for answer in _normal_forms(golden_answers)))


def extract_solution(solution_str: str) -> str | None:
    """Return the stripped content of the last <answer>...</answer>, or None."""
    answer = last_answer(solution_str)
    return None if answer is None else answer.strip()


def count_answer_tags(text: str) -> tuple[int, int]:
    """Return the numbers of <answer> and </answer>."""
    return text.count("<answer>"), text.count("</answer>")


def compute_score_subem(
    solution_str: str,
    ground_truth: Mapping[str, Any],
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Return `score` for an answer that contains a reference, `format_score` for another answer, 0 without one."""
    answer = extract_solution(solution_str)
    if answer is None:
        return 0.0
    return score if subem_check(answer, ground_truth["target"]) else format_score


def _normal_forms(answers: str | Sequence[str]) -> list[str]:
    return [normal_form(answer) for answer in ([answers] if isinstance(answers, str) else answers)]
