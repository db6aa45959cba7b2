"""Curves of one line."""

from __future__ import annotations

import pytest

from mcore_rl.observe.watch.sparkline import sparkline


@pytest.mark.parametrize(
    ("values", "width", "drawn"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█"),
        ([7, 0], 8, "█▁"),
        ([0, 2, 7, 7, 0, 0], 3, "▂█▁"),  # means 1, 7, 0
        ([1, None, 3], 8, "▁ █"),
        ([1, None, None, 3, 3, 3], 3, "▁██"),  # an unknown value does not count in a mean
        ([5, 5, 5], 8, "▁▁▁"),
        ([0.1] * 41, 7, "▁▁▁▁▁▁▁"),  # means of 5 and of 6 values differ by rounding
        ([None, None], 8, ""),
        ([], 8, ""),
        ([-1.7e308, 1.7e308], 8, "▁█"),
        ([1.7e308] * 4 + [0] * 4, 2, "█▁"),
    ],
)
def test_sparkline_draws_means_of_consecutive_values(values: list[float | None], width: int, drawn: str) -> None:
    assert sparkline(values, width) == drawn
