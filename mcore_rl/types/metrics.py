"""Metrics of a step. The type of a metric defines how it is reduced over micro-batches, ranks and updates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np


class _Sums:
    """Metric whose fields are all summed over micro-batches, ranks and updates."""

    def __add__(self, other: Self) -> Self:
        # vars() lists the fields in the order of the constructor's parameters.
        return type(self)(*(getattr(self, name) + getattr(other, name) for name in vars(self)))


@dataclass(frozen=True)
class Mean(_Sums):
    """Average: a sum and the number of its terms."""

    total: float
    count: float

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else 0.0


@dataclass(frozen=True)
class Max:
    """Largest value."""

    value: float

    def __add__(self, other: Max) -> Max:
        return Max(max(self.value, other.value))


@dataclass(frozen=True)
class Min:
    """Smallest value."""

    value: float

    def __add__(self, other: Min) -> Min:
        return Min(min(self.value, other.value))


@dataclass(frozen=True)
class Quantile:
    """Smallest x such that at least `fraction` of all numbers are <= x; 0 without numbers. `counts` maps numbers to
    frequencies."""

    fraction: float
    counts: Counter[float]

    def __add__(self, other: Quantile) -> Quantile:
        return Quantile(self.fraction, self.counts + other.counts)

    @property
    def value(self) -> float:
        # Frequencies can be added over ranks; quantiles of parts cannot.
        numbers = sorted(self.counts)
        up_to = np.cumsum([self.counts[number] for number in numbers])
        return numbers[int(np.searchsorted(up_to, self.fraction * up_to[-1]))] if numbers else 0.0


@dataclass(frozen=True)
class Total(_Sums):
    """Sum, such as a count."""

    value: float


@dataclass(frozen=True)
class EffectiveFraction(_Sums):
    """Effective sample size divided by the sample size. `total` is the sum of the weights, `squares` the sum of their
    squares.

    Source: Kish, (sum w)^2 / sum w^2; the fraction is 1 for equal weights.
    """

    total: float
    squares: float
    count: float

    @property
    def value(self) -> float:
        return self.total**2 / (self.squares * self.count) if self.squares else 0.0


@dataclass(frozen=True)
class ExplainedVariance(_Sums):
    """1 - Var(error) / Var(returns) from sums over tokens; error is returns - values. 0 if the returns are constant."""

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
        # A smaller spread is rounding noise: the difference of two nearly equal float64 numbers.
        return 1 - unexplained / spread if spread > 1e-12 * self.returns_squares / self.count else 0.0


@dataclass(frozen=True)
class Correlation(_Sums):
    """Pearson correlation from sums over pairs (x, y); 0 if x or y is constant."""

    count: float
    x: float
    y: float
    xx: float
    yy: float
    xy: float

    @property
    def value(self) -> float:
        # Rounding can make the spread of equal numbers slightly negative.
        spread_x = self.xx * self.count - self.x**2
        spread_y = self.yy * self.count - self.y**2
        product = spread_x * spread_y
        return (self.xy * self.count - self.x * self.y) / product**0.5 if min(spread_x, spread_y) > 0 else 0.0


@dataclass(frozen=True)
class Deviation(_Sums):
    """Standard deviation from sums of numbers and of their squares."""

    total: float
    squares: float
    count: float

    @property
    def value(self) -> float:
        if not self.count:
            return 0.0
        # Rounding can make the difference slightly negative.
        variance = self.squares / self.count - (self.total / self.count) ** 2
        return float(max(variance, 0.0) ** 0.5)


@dataclass(frozen=True)
class Root(_Sums):
    """Norm: the square root of a sum of squares."""

    squares: float

    @property
    def value(self) -> float:
        return float(self.squares**0.5)


Metric = Mean | Max | Min | Quantile | Total | EffectiveFraction | ExplainedVariance | Correlation | Deviation | Root


def merge_metrics(parts: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Reduce metrics key by key, as their types define."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for key, metric in part.items():
            # The metrics of one key have the same type, which mypy cannot know.
            merged[key] = merged[key] + metric if key in merged else metric  # type: ignore[operator]
    return merged


@dataclass(frozen=True)
class LogpGap:
    """Absolute differences of log-probabilities. Gaps of several ranks are combined with `+`.

    `own_routing`: the trainer computed the routing of a mixture-of-experts model itself instead of replaying the
    engine's.
    Units: nats.
    """

    mean: Mean
    median: Quantile
    largest: Max
    own_routing: bool

    @classmethod
    def between(cls, differences: Iterable[float], *, own_routing: bool) -> LogpGap:
        """Summarize absolute differences, one per token."""
        values = list(differences)
        return cls(
            # fsum does not depend on the order of the differences.
            Mean(math.fsum(values), len(values)),
            Quantile(0.5, Counter(values)),
            Max(max(values, default=0.0)),
            own_routing,
        )

    def __add__(self, other: LogpGap) -> LogpGap:
        return LogpGap(
            self.mean + other.mean,
            self.median + other.median,
            self.largest + other.largest,
            self.own_routing or other.own_routing,
        )

    @property
    def num_tokens(self) -> int:
        return int(self.mean.count)

    @property
    def typical(self) -> float:
        """Mean difference, or the median if the trainer computed the routing itself. Rounding then sends some tokens to
        other experts and changes their log-probabilities a lot, whereas a systematic error shifts most tokens. Not
        finite if any token's difference is not finite."""
        if self.own_routing and math.isfinite(self.mean.value):
            return self.median.value
        return self.mean.value
