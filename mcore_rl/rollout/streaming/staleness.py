"""How old the groups of a step are, in versions of the weights, when they are trained; and how many there are."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mcore_rl.types import Max, Mean, Metric, RolloutScalars


def describe_staleness(submitted: Sequence[int], scalars: Sequence[RolloutScalars], version: int) -> dict[str, Metric]:
    """Of groups that were submitted at these versions and are trained at `version`.

    staleness/mean and max are of groups, groups_N the share of groups that are N versions old; tokens_mean and tokens_N
    are of trained tokens, by the weights that drew them; mixed_fraction is the share of responses that different
    weights have drawn.
    """
    ages = version - np.asarray(submitted, np.int64)
    versions = np.concatenate([part.versions for part in scalars])
    drawn = [entry for part in scalars for entry in part.version_tokens]
    drawn_by, counts = np.array(drawn, np.int64).reshape(-1, 2).T
    tokens = np.bincount(version - drawn_by, weights=counts)
    total = float(tokens.sum())
    return {
        "staleness/mean": Mean(float(ages.sum()), len(ages)),
        "staleness/max": Max(float(ages.max(initial=0))),
        "staleness/tokens_mean": Mean(float(tokens @ np.arange(len(tokens))), total),
        "staleness/mixed_fraction": Mean(float((versions[:, 0] != versions[:, 1]).sum()), len(versions)),
        **{f"staleness/groups_{age}": Mean(float((ages == age).sum()), len(ages)) for age in range(ages.max() + 1)},
        **{f"staleness/tokens_{age}": Mean(float(count), total) for age, count in enumerate(tokens)},
    }


@dataclass
class Queues:
    """How many there are of several things, on average over the time between two calls of `means`."""

    counts: Callable[[], dict[str, int]]
    """How many there are now, by name."""
    now: Callable[[], float] = time.perf_counter
    _since: float = field(init=False)
    _changed: float = field(init=False)
    _counts: dict[str, int] = field(init=False)
    """Since the last change."""
    _areas: dict[str, float] = field(init=False)
    """Of each the number times seconds."""

    def __post_init__(self) -> None:
        self._since = self._changed = self.now()
        self._counts = self.counts()
        self._areas = dict.fromkeys(self._counts, 0.0)

    def look(self) -> None:
        """To be called when they have changed."""
        now = self.now()
        for name, count in self._counts.items():
            self._areas[name] += count * (now - self._changed)
        self._changed, self._counts = now, self.counts()

    def means(self) -> dict[str, Metric]:
        self.look()
        elapsed, areas = self._changed - self._since, self._areas
        self._since, self._areas = self._changed, dict.fromkeys(areas, 0.0)
        return {name: Mean(area, elapsed) for name, area in areas.items()}
