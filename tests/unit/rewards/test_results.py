"""Conversion of numbers of different libraries to scores, and rejected values."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from mcore_rl.rewards.results import score_of, scores_of

HALVES = [
    0.5,
    np.float32(0.5),
    np.array(0.5),
    np.array([[0.5]]),
    torch.tensor(0.5),
    torch.tensor([0.5]),
    torch.tensor([[0.5]], dtype=torch.bfloat16),
    torch.tensor(0.5, requires_grad=True),
    Decimal("0.5"),
    Fraction(1, 2),
]
ONES = [True, np.bool_(True), torch.tensor(True), np.int64(1), torch.tensor(1), 1]
NO_NUMBERS = [
    torch.tensor([0.5, 0.5]),
    torch.tensor([]),
    torch.tensor(float("nan")),
    torch.tensor(0.5, device="meta"),
    np.array([0.5, 0.5]),
    np.inf,
    Decimal("NaN"),
    Decimal("sNaN"),
    Decimal("1e999"),
    10**400,
    10**5000,
    1j,
    torch.tensor(1j),
    "0.5",
    [0.5],
]


@pytest.mark.parametrize(("value", "number"), [*((half, 0.5) for half in HALVES), *((one, 1.0) for one in ONES)])
def test_a_number_of_any_library_is_a_score(value: object, number: float) -> None:
    assert score_of(value).reward == number
    score = score_of({"score": value, "acc": value, "part": value})
    assert (score.error, score.reward, score.accuracy, score.parts) == (None, number, number, {"part": number})


@pytest.mark.parametrize(
    ("result", "reward", "accuracy"),
    [
        ({"score": -1.0, "acc": False}, -1.0, 0.0),
        ({"score": 0.3}, 0.3, 0.3),
        ({"score": 0.3, "acc": None, "pred": "x"}, 0.3, 0.3),
        ({"score": 1.0, "acc": 0.5, "format": 0.25}, 1.0, 0.5),
    ],
)
def test_accuracy_of_a_dict_is_its_acc_or_else_its_score(result: object, reward: float, accuracy: float) -> None:
    score = score_of(result)
    assert (score.reward, score.accuracy, score.error) == (reward, accuracy, None)


def test_other_entries_of_a_dict_become_parts_with_free_names() -> None:
    parts = {
        "format": np.float32(0.5),
        "ok": True,
        "pred": "4\ud83d2",
        "steps": [1, 2],
        "nothing": None,
        "limit": math.inf,
        "huge": 10**5000,
        "mean": 3,
        "prompt": "p",
        7: 8,
    }
    assert score_of({"score": 1, "acc": True} | parts).parts == {
        "format": 0.5,
        "ok": 1.0,
        "pred": "4\\ud83d2",
        "steps": "[1, 2]",
        "limit": "inf",
        "huge": "<int>",
        "mean_part": 3.0,
        "prompt_part": "p",
        "7": 8.0,
    }
    assert len(score_of({"score": 1, "long": "x" * 10**6}).parts["long"]) == 2000
    assert score_of(0.5).parts == {}


@pytest.mark.parametrize("result", [None, {}, {"acc": 1}, {"score": None}])
def test_a_result_without_a_score_is_an_error(result: object) -> None:
    score = score_of(result)
    assert score.error
    assert (score.reward, score.accuracy) == (0.0, 0.0)


@pytest.mark.parametrize("value", NO_NUMBERS, ids=range(len(NO_NUMBERS)))
def test_a_value_that_is_no_finite_number_is_an_error(value: object) -> None:
    for result in (value, {"score": value}, {"score": 1.0, "acc": value}):
        score = score_of(result)
        assert score.reward == 0.0
        assert "instead of a finite number" in (score.error or "")


@pytest.mark.parametrize(
    "values",
    [
        torch.tensor([0.5, 1.0]),
        torch.tensor([[0.5], [1.0]]),
        [torch.tensor(0.5), np.float64(1.0)],
        np.array([0.5, 1.0]),
    ],
)
def test_a_batch_of_numbers_of_any_library_is_scores(values: object) -> None:
    assert [score.reward for score in scores_of(values, 2)] == [0.5, 1.0]


@pytest.mark.parametrize("values", [torch.tensor(0.5), "12", None, {0: 1.0, 1: 1.0}])
def test_a_batch_that_is_no_sequence_is_an_error_of_all(values: object) -> None:
    assert all("instead of a list of 2 results" in (score.error or "") for score in scores_of(values, 2))
