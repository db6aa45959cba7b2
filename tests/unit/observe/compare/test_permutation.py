"""Exact permutation test, against values that are counted by hand and brute force."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest

from mcore_rl.observe.compare.permutation import Significance, significance


@pytest.mark.parametrize(
    ("first", "second", "p_value", "smallest"),
    [
        # The most extreme of 6 splits, and its mirror image.
        ([1, 2], [3, 4], 2 / 6, 2 / 6),
        # Sides of unequal size have no mirror image.
        ([4, 9], [1, 2, 3], 1 / 10, 1 / 10),
        ([1, 2, 3], [4, 5, 6], 2 / 20, 2 / 20),
        # The sums of two values are 3, 4, 5, 5, 6 and 7; all but the middle ones differ from 5 by at least 1.
        ([1, 3], [2, 4], 4 / 6, 2 / 6),
        ([5, 5], [5, 5], 1, 2 / 6),
    ],
)
def test_significance_counts_splits(first: list[float], second: list[float], p_value: float, smallest: float) -> None:
    assert significance(first, second) == Significance(pytest.approx(p_value), pytest.approx(smallest))


def test_significance_equals_brute_force_on_ties_and_large_values() -> None:
    # Multiples of 1/64 around a large number are exact, so brute force needs no tolerance.
    draw = random.Random(3)
    for sizes in ((2, 3), (3, 3), (4, 2), (5, 4)):
        values = [1e6 + draw.randrange(8) / 64 for _ in range(sum(sizes))]
        first, second = values[: sizes[0]], values[sizes[0] :]
        observed = abs(statistics.fmean(first) - statistics.fmean(second))
        count = 0
        for chosen in itertools.combinations(range(len(values)), sizes[0]):
            one = [values[place] for place in chosen]
            other = [value for place, value in enumerate(values) if place not in chosen]
            count += abs(statistics.fmean(one) - statistics.fmean(other)) >= observed - 1e-7
        found = significance(first, second)
        assert found is not None
        assert found.p_value == count / math.comb(len(values), sizes[0])


def test_significance_is_symmetric_and_independent_of_units() -> None:
    first, second = [0.31, 0.35, 0.33], [0.36, 0.30, 0.41, 0.39]
    assert significance(first, second) == significance(second, first)
    assert significance([1e-12 * v for v in first], [1e-12 * v for v in second]) == significance(first, second)


@pytest.mark.parametrize("sizes", [(1, 5), (5, 1), (0, 2), (15, 15)])
def test_significance_of_too_few_or_too_many_runs_is_unknown(sizes: tuple[int, int]) -> None:
    assert significance([1.0] * sizes[0], [2.0] * sizes[1]) is None
