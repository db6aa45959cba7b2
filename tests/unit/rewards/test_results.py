"""Conversion of numbers of different libraries to scores, and rejected values."""

from __future__ import annotations

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


@pytest.mark.parametrize("value", HALVES)
def test_a_number_of_any_library_is_a_score(value: object) -> None:
    assert score_of(value).reward == 0.5
    score = score_of({"score": value, "acc": value, "part": value})
    assert (score.error, score.reward, score.accuracy, score.parts) == (None, 0.5, 0.5, {"part": 0.5})


@pytest.mark.parametrize("value", ONES)
def test_booleans_and_integers_are_scores(value: object) -> None:
    assert score_of(value).reward == 1.0


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
