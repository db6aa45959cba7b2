"""Comparison of each metric: its values on each side, and differences from the first side."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from mcore_rl.observe.compare.permutation import Significance, significance
from mcore_rl.observe.compare.sides import Side
from mcore_rl.observe.report.run_files import RunFiles
from mcore_rl.observe.summary import ACCURACY, MAIN_METRICS


@dataclass(frozen=True)
class Statistic:
    """Values of a metric in the runs of a side. `deviation`: of the sample, n - 1; None for a single run."""

    values: list[float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float | None:
        return statistics.stdev(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True)
class MetricComparison:
    """One metric. `sides`: its statistic on each side; None if a run of the side lacks it."""

    name: str
    sides: list[Statistic | None]

    def difference(self, number: int) -> float | None:
        """Return the mean of a side minus the mean of the first one."""
        first, other = self.sides[0], self.sides[number]
        return None if first is None or other is None else other.mean - first.mean

    def significance(self, number: int) -> Significance | None:
        """Test a side against the first one; None unless both have several runs."""
        first, other = self.sides[0], self.sides[number]
        return None if first is None or other is None else significance(first.values, other.values)


def last_common_step(sides: Sequence[Side]) -> int | None:
    """Return the last step that all runs have finished; None without one."""
    steps = [set(run.records) for side in sides for run in side.runs]
    return max(set.intersection(*steps), default=None)


def compare_metrics(sides: Sequence[Side], step: int) -> list[MetricComparison]:
    """Return the best validation accuracy up to a step, and the main metrics at this step. Metrics that no side has are
    left out."""
    readers: dict[str, Callable[[RunFiles], float | None]] = {
        f"best {ACCURACY}": partial(best_accuracy, step=step),
        **{name: partial(_value_at, step=step, name=name) for name in MAIN_METRICS},
    }
    compared = [MetricComparison(name, [_statistic(side, read) for side in sides]) for name, read in readers.items()]
    return [each for each in compared if any(side is not None for side in each.sides)]


def _value_at(run: RunFiles, step: int, name: str) -> float | None:
    return run.records[step].get(name)


def best_accuracy(run: RunFiles, step: int) -> float | None:
    """Return the highest validation accuracy up to a step: a longer run has no advantage."""
    values = (values.get(ACCURACY) for number, values in run.records.items() if number <= step)
    return max((value for value in values if value is not None), default=None)


def _statistic(side: Side, read: Callable[[RunFiles], float | None]) -> Statistic | None:
    values = [read(run) for run in side.runs]
    known = [each for each in values if each is not None]
    return Statistic(known) if len(known) == len(values) else None
