"""Conditions under which the value of a metric is a sign of a problem. Each can describe itself for docs/metrics.md."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

WINDOW = 20
"""Number of earlier values in a median, and of initial steps without warnings about the critic."""


@dataclass
class History:
    """Earlier values of a metric. A resumed run starts with its first step after the resume."""

    first: float
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    @property
    def median(self) -> float | None:
        """Median of the last WINDOW values; None until there are so many."""
        return statistics.median(self.recent) if len(self.recent) == WINDOW else None


class Condition(Protocol):
    """Condition on the current value of a metric and its history, which excludes the current value."""

    def holds(self, now: float, history: History) -> bool: ...

    def describe(self) -> str:
        """Describe the condition, such as `above 0.3`."""


@dataclass(frozen=True)
class Above:
    """now > limit."""

    limit: float

    def holds(self, now: float, history: History) -> bool:
        return now > self.limit

    def describe(self) -> str:
        return f"above {self.limit:g}"


@dataclass(frozen=True)
class Below:
    """now < limit."""

    limit: float

    def holds(self, now: float, history: History) -> bool:
        return now < self.limit

    def describe(self) -> str:
        return f"below {self.limit:g}"


@dataclass(frozen=True)
class Outside:
    """abs(now) > limit."""

    limit: float

    def holds(self, now: float, history: History) -> bool:
        return abs(now) > self.limit

    def describe(self) -> str:
        return f"above {self.limit:g} or below {-self.limit:g}"


@dataclass(frozen=True)
class Equal:
    """now == value."""

    value: float

    def holds(self, now: float, history: History) -> bool:
        return now == self.value

    def describe(self) -> str:
        return f"equal to {self.value:g}"


@dataclass(frozen=True)
class Fallen:
    """now < fraction * first."""

    fraction: float

    def holds(self, now: float, history: History) -> bool:
        return now < self.fraction * history.first

    def describe(self) -> str:
        return f"below {self.fraction:.0%} of the first value"


@dataclass(frozen=True)
class Risen:
    """now >= at_least and now >= first + rise."""

    at_least: float
    rise: float

    def holds(self, now: float, history: History) -> bool:
        return now >= self.at_least and now >= history.first + self.rise

    def describe(self) -> str:
        return f"at least {self.at_least:g}, and at least {self.rise:g} above the first value"


@dataclass(frozen=True)
class Outlier:
    """now > times * median of the last WINDOW values > 0."""

    times: float

    def holds(self, now: float, history: History) -> bool:
        # Steps without signal can have a value of 0, and any value would exceed a median of 0.
        return (median := history.median) is not None and now > self.times * median > 0

    def describe(self) -> str:
        return f"above {self.times:g} times the median of the last {WINDOW} steps"


@dataclass(frozen=True)
class Repeated:
    """now > limit, and so were the last steps - 1 values. steps: at most WINDOW + 1."""

    limit: float
    steps: int

    def holds(self, now: float, history: History) -> bool:
        last = [*history.recent, now][-self.steps :]
        return len(last) == self.steps and min(last) > self.limit

    def describe(self) -> str:
        return f"above {self.limit:g} in {self.steps} steps in a row"
