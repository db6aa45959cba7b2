"""Boundaries of the conditions, and their descriptions."""

from __future__ import annotations

import pytest

from mcore_rl.observe.guide.conditions import (
    WINDOW,
    Above,
    Below,
    Condition,
    Equal,
    Fallen,
    History,
    Outlier,
    Outside,
    Repeated,
    Risen,
)

BOUNDARIES: list[tuple[Condition, float, float, str]] = [
    (Above(0.5), 0.5, 0.51, "above 0.5"),
    (Below(-0.5), -0.5, -0.51, "below -0.5"),
    (Outside(0.5), -0.5, -0.51, "above 0.5 or below -0.5"),
    (Outside(0.5), 0.5, 0.51, "above 0.5 or below -0.5"),
    (Equal(1), 0.99, 1.0, "equal to 1"),
    (Fallen(0.25), 0.5, 0.49, "below 25% of the first value"),
    (Risen(0.5, 1.5), 3.49, 3.5, "at least 0.5, and at least 1.5 above the first value"),
    (Risen(4.0, 1.5), 3.99, 4.0, "at least 4, and at least 1.5 above the first value"),
]


@pytest.mark.parametrize(("condition", "healthy", "sign", "text"), BOUNDARIES)
def test_condition_holds_beyond_its_boundary(condition: Condition, healthy: float, sign: float, text: str) -> None:
    history = History(first=2.0)
    assert not condition.holds(healthy, history)
    assert condition.holds(sign, history)
    assert condition.describe() == text


def test_outlier_needs_a_full_window_and_uses_the_last_values() -> None:
    history = History(first=1.0)
    for _ in range(WINDOW - 1):
        history.recent.append(1.0)
    assert not Outlier(20).holds(1e9, history)
    history.recent.append(1.0)
    assert not Outlier(20).holds(20.0, history)
    assert Outlier(20).holds(20.1, history)
    for _ in range(WINDOW):
        history.recent.append(2.0)
    assert not Outlier(20).holds(40.0, history)


def test_outlier_with_a_median_of_zero_never_holds() -> None:
    history = History(first=0.0)
    history.recent.extend([0.0] * WINDOW)
    assert not Outlier(20).holds(1.0, history)


@pytest.mark.parametrize(
    ("earlier", "now", "holds"),
    [([1, 2], 1, True), ([0, 1, 2], 1, True), ([1, 0, 1], 1, False), ([1, 1], 0, False), ([1], 1, False)],
)
def test_repeated_needs_every_step_above_its_limit(earlier: list[float], now: float, holds: bool) -> None:
    history = History(first=0.0)
    history.recent.extend(earlier)
    assert Repeated(0, steps=3).holds(now, history) == holds
    assert Repeated(0, steps=3).describe() == "above 0 in 3 steps in a row"
