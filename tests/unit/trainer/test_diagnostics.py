"""Metrics of a step's responses compared with counts by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mcore_rl.trainer.batches import describe
from mcore_rl.trainer.diagnostics import (
    describe_advantages,
    describe_columns,
    describe_groups,
    describe_lengths,
    describe_signal,
)
from mcore_rl.types import Groups, Max, Mean, RolloutScalars
from tests.unit.rollouts import scalars_of

# Four groups of two in two rollout calls, ids unsorted: both right, one right, none right, none right.
GROUPS = [[7, 7, 3, 3], [5, 5, 4, 4]]
ACCURACIES = [[1, 1, 1, 0], [0, 0, 0, 0]]
REWARDS = [[1, 1, 1, -1], [0, 0, -0.5, 0]]
TOKENS = [[10, 20, 30, 40], [100, 100, 200, 200]]
CLIPPED = [[0, 0, 0, 1], [0, 0, 1, 1]]


def scalars() -> list[RolloutScalars]:
    return [
        scalars_of(ids, tokens, rewards, accuracies=np.array(right, np.float32), clipped=np.array(clipped, np.uint8))
        for ids, tokens, rewards, right, clipped in zip(GROUPS, TOKENS, REWARDS, ACCURACIES, CLIPPED, strict=True)
    ]


def test_describe_groups_computes_solve_rates() -> None:
    found = {name: metric.value for name, metric in describe_groups(scalars()).items()}
    assert found["groups/solved_all"] == 1 / 4
    assert found["groups/solved_none"] == 2 / 4
    assert found["groups/solve_rate_std"] == pytest.approx(np.std([1, 0.5, 0, 0]))


def test_describe_signal_counts_groups_with_equal_rewards() -> None:
    # Groups 7 and 5 have equal rewards; group 4 has no right answer, but different rewards.
    assert describe_signal(scalars(), None)["groups/without_signal"] == Mean(2.0, 4)


@pytest.mark.parametrize(
    ("others", "silent", "equal"),
    [
        ([-1, 1, 1, -1, 1, 1, -1, -1], 0.0, 0.0),  # solvers 1 and -1, critics the opposite
        ([-1, 1, 1, -1, -1, 1, -1, 1], 1.0, 0.0),  # group 6: solvers 1 and 1, critics -1 and -1
        ([-1, 1, -1, 1, -1, 1, -1, 1], 2.0, 1.0),
    ],
)
def test_describe_signal_compares_rewards_of_one_role(others: list[float], silent: float, equal: float) -> None:
    """Groups 5 and 6 have two episodes of a solver and a critic each; the reward of every episode is 0."""
    roles, episodes = np.array(["solver", "critic"] * 4), np.array([0, 0, 2, 2, 4, 4, 6, 6])
    columns = {"roles": roles, "episodes": episodes, "other_rewards": np.array(others, np.float32)}
    groups = Groups((), (scalars_of([5, 5, 5, 5, 6, 6, 6, 6], 4, **columns),), (np.arange(8),))
    found = describe(groups, baseline="role")
    assert (found["groups/without_signal"], found["groups/all_equal"]) == (Mean(silent, 2), Max(equal))
    found = describe(groups)
    assert (found["groups/without_signal"], found["groups/all_equal"]) == (Mean(2.0, 2), Max(1.0))


def test_describe_lengths_of_right_and_wrong_answers() -> None:
    found = {name: metric.value for name, metric in describe_lengths(scalars()).items()}
    assert found["response_tokens/mean_right"] == 20
    assert found["response_tokens/mean_wrong"] == pytest.approx(640 / 5)
    assert found["response_tokens/clipped_fraction_right"] == 0
    assert found["response_tokens/clipped_fraction_wrong"] == 3 / 5
    assert found["response_tokens/p50"] == 70


def test_describe_lengths_omits_an_empty_side() -> None:
    wrong = scalars()[1:]
    assert "response_tokens/mean_right" not in describe_lengths(wrong)
    assert describe_groups([]) == describe_lengths([]) == {}


def test_describe_columns_average_over_existing_values() -> None:
    parts = {"format": np.array([0.5, np.nan, 1, 0]), "none": np.full(4, np.nan), "rare": np.array([np.nan, 8, 2, 2])}
    found = describe_columns([parts, {"format": np.ones(4)}], "reward/")
    assert found == {"reward/format": Mean(5.5, 7), "reward/none": Mean(0.0, 0), "reward/rare": Mean(12.0, 3)}


def test_describe_advantages_computes_all_metrics() -> None:
    found = {
        name: metric.value for name, metric in describe_advantages(np.array([1.5, 0, 0, -0.5], np.float32)).items()
    }
    assert found["advantages/mean"] == 0.25
    assert (found["advantages/min"], found["advantages/max"]) == (-0.5, 1.5)
    assert (found["advantages/positive_fraction"], found["advantages/zero_fraction"]) == (0.25, 0.5)
    assert found["advantages/std"] == pytest.approx(np.std([1.5, 0, 0, -0.5]))


@pytest.mark.parametrize(
    ("rewards", "unpunished", "wanted"),
    [
        ([[0, 0, 0, 0], [0, 0, 0, 0]], None, 1.0),
        ([[1, 1, 1, 1], [1, 1, 1, 1]], None, 1.0),
        ([[1, 1, 1, 1], [0, 0, 0, 0]], None, 0.0),  # equal within every group and call, but not over the step
        ([[0, 0, 0, 0], [0, 0, 0, 0.5]], None, 0.0),
        ([[0, 0, 0, 0], [-0.1, -0.2, -0.9, -0.9]], 50, 1.0),  # only the punishment of long responses differs
        ([[0, 0, 0, 0], [-0.1, -0.2, -0.9, -0.9]], None, 0.0),
    ],
)
def test_describe_signal_of_equal_rewards_is_one(
    rewards: list[list[float]], unpunished: int | None, wanted: float
) -> None:
    parts = [replace(part, rewards=np.float32(own)) for part, own in zip(scalars(), rewards, strict=True)]
    assert describe_signal(parts, unpunished)["groups/all_equal"] == Max(wanted)


def test_describe_signal_of_one_response_is_not_compared() -> None:
    assert describe_signal([], None) == {}
    assert "groups/all_equal" not in describe_signal(scalars(), 10)
