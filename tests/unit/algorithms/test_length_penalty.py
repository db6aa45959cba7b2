"""The length penalty compared with the formula of the paper in loops."""

from __future__ import annotations

import numpy as np
import pytest

from mcore_rl.algorithms.length_penalty import length_penalties


def test_length_penalties_match_the_formula_in_loops():
    rng = np.random.default_rng(0)
    ids, lengths = rng.choice([5, -2, 9], 30), rng.integers(0, 50, 30)
    accuracies = np.where(ids == 9, 0.0, rng.choice([0.0, 0.4, 1.0], 30))  # no response of group 9 is right
    found = length_penalties(0.01, lengths=lengths, accuracies=accuracies, group_ids=ids)
    for i in range(30):
        group = [j for j in range(30) if ids[j] == ids[i]]
        solved = sum(accuracies[j] > 0.5 for j in group) / len(group)
        assert found[i] == pytest.approx(0.01 * lengths[i] * max(solved, 1 / len(group)))


def test_length_penalties_grow_with_the_pass_rate():
    found = length_penalties(
        1.0,
        lengths=np.array([10, 10] * 3),
        accuracies=np.array([1, 1, 1, 0, 0, 0.0]),
        group_ids=np.repeat([0, 1, 2], 2),
    )
    assert found.tolist() == [10, 10, 5, 5, 5, 5]
