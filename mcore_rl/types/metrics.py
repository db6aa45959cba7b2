"""Figures of a step, whose type says how they combine over micro-batches, ranks and updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np


class _Sums:
    """A metric of which every field adds up over micro-batches, ranks and updates."""

    def __add__(self, other: Self) -> Self:
        return type(self)(*(getattr(self, name) + getattr(other, name) for name in vars(self)))


@dataclass(frozen=True)
class Mean(_Sums):
    """A metric to be averaged."""

    total: float
    count: float

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else 0.0


@dataclass(frozen=True)
class Max:
    """A metric of which the largest counts."""

    value: float

    def __add__(self, other: Max) -> Max:
        return Max(max(self.value, other.value))


@dataclass(frozen=True)
class Min:
    """A metric of which the smallest counts."""

    value: float

    def __add__(self, other: Min) -> Min:
        return Min(min(self.value, other.value))


@dataclass(frozen=True)
class Quantile:
    """The least number that `fraction` of all are not above; 0 of none. `counts`: how often each number was met."""

    fraction: float
    counts: Counter[float]

    def __add__(self, other: Quantile) -> Quantile:
        return Quantile(self.fraction, self.counts + other.counts)

    @property
    def value(self) -> float:
        numbers = sorted(self.counts)
        up_to = np.cumsum([self.counts[number] for number in numbers])
        return numbers[int(np.searchsorted(up_to, self.fraction * up_to[-1]))] if numbers else 0.0


@dataclass(frozen=True)
class Total(_Sums):
    """A metric that adds up, such as a count."""

    value: float


@dataclass(frozen=True)
class EffectiveFraction(_Sums):
    """Effective sample size over sample size, of weights that add up to `total` and their squares to `squares`.

    Source: Kish, (sum w)^2 / sum w^2; 1 where all weights are equal.
    """

    total: float
    squares: float
    count: float

    @property
    def value(self) -> float:
        return self.total**2 / (self.squares * self.count) if self.squares else 0.0


@dataclass(frozen=True)
class ExplainedVariance(_Sums):
    """1 - Var(error) / Var(returns), of sums over tokens; error is returns - values. 0 where returns do not vary."""

    returns: float
    returns_squares: float
    errors: float
    errors_squares: float
    count: float

    @property
    def value(self) -> float:
        if not self.count:
            return 0.0
        spread = self.returns_squares / self.count - (self.returns / self.count) ** 2
        unexplained = self.errors_squares / self.count - (self.errors / self.count) ** 2
        # Below it the spread is what float64 leaves of a difference of equal numbers.
        return 1 - unexplained / spread if spread > 1e-12 * self.returns_squares / self.count else 0.0


@dataclass(frozen=True)
class Correlation(_Sums):
    """Pearson's, of sums over pairs (x, y); 0 where either does not vary."""

    count: float
    x: float
    y: float
    xx: float
    yy: float
    xy: float

    @property
    def value(self) -> float:
        spread_x = self.xx * self.count - self.x**2
        spread_y = self.yy * self.count - self.y**2
        product = spread_x * spread_y
        return (self.xy * self.count - self.x * self.y) / product**0.5 if min(spread_x, spread_y) > 0 else 0.0


@dataclass(frozen=True)
class Deviation(_Sums):
    """Standard deviation, of sums of numbers and of their squares."""

    total: float
    squares: float
    count: float

    @property
    def value(self) -> float:
        if not self.count:
            return 0.0
        variance = self.squares / self.count - (self.total / self.count) ** 2
        return float(max(variance, 0.0) ** 0.5)


@dataclass(frozen=True)
class Root(_Sums):
    """A norm: squares add up over ranks, the root is taken of their sum."""

    squares: float

    @property
    def value(self) -> float:
        return float(self.squares**0.5)


Metric = Mean | Max | Min | Quantile | Total | EffectiveFraction | ExplainedVariance | Correlation | Deviation | Root


def merge_metrics(parts: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Adds metrics key by key; how they combine is in their type."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for key, metric in part.items():
            merged[key] = merged[key] + metric if key in merged else metric  # type: ignore[operator]
    return merged
