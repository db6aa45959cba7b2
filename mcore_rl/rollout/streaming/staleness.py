"""Metrics of asynchronous training: age of trained groups and tokens in weight versions, and queue lengths."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from mcore_rl.types import Max, Mean, Metric, RolloutScalars


def describe_staleness(submitted: Sequence[int], scalars: Sequence[RolloutScalars], version: int) -> dict[str, Metric]:
    """Describe groups that were submitted at these versions and are trained at `version`.

    staleness/mean and max refer to groups; groups_N is the fraction of groups that are N versions old. tokens_mean and
    tokens_N refer to trained tokens and the weights that sampled them. mixed_fraction is the fraction of responses
    sampled with more than one version.
    """
    ages = version - np.asarray(submitted, np.int64)
    versions = np.concatenate([part.versions for part in scalars])
    drawn = [entry for part in scalars for entry in part.version_tokens]
    # reshape: the list is empty if no token is trained.
    drawn_by, counts = np.array(drawn, np.int64).reshape(-1, 2).T
    # tokens[n]: trained tokens that were sampled n versions before `version`.
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


class QueueLengths:
    """Time-weighted mean lengths of several queues between two calls of `means`. `counts` returns the current lengths
    by name."""

    def __init__(self, counts: Callable[[], dict[str, int]], now: Callable[[], float] = time.perf_counter) -> None:
        self.counts, self.now = counts, now
        self._since = self._changed = now()
        # The lengths since the last update, and the integral of each length over time, in seconds.
        self._counts = counts()
        self._areas = dict.fromkeys(self._counts, 0.0)

    def update(self) -> None:
        """Record the current lengths; call it after each change."""
        now = self.now()
        # The lengths were constant since the last update.
        for name, count in self._counts.items():
            self._areas[name] += count * (now - self._changed)
        self._changed, self._counts = now, self.counts()

    def means(self) -> dict[str, Metric]:
        self.update()
        elapsed, areas = self._changed - self._since, self._areas
        self._since, self._areas = self._changed, dict.fromkeys(areas, 0.0)
        return {name: Mean(area, elapsed) for name, area in areas.items()}
