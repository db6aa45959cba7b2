"""Statistics over all responses of a step: solve rates of groups and lengths."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

SOLVED = 0.5
"""Accuracy above which a response counts as right, as in the metrics groups/solved_*."""
EDGES = (0, 1, *sorted({bound for power in range(1, 24) for bound in (2**power, 3 * 2 ** (power - 1))}))
"""Lower bounds of the bins of response lengths in tokens; two bins per factor of 2."""
RATES = 9
"""Number of bins of solve rates, 0, 1/8, ... 1: groups usually have a power of 2 of responses, which fill all bins."""


@dataclass
class StepStatistics:
    """Counts over the responses of one step.

    groups: {group: [responses, right responses]}.
    lengths: number of wrong and of right responses in each bin of EDGES.
    """

    groups: dict[int, list[int]] = field(default_factory=dict)
    lengths: tuple[list[int], list[int]] = field(default_factory=lambda: ([0] * len(EDGES), [0] * len(EDGES)))
    num_responses: int = 0

    def count(self, record: Mapping[str, object]) -> None:
        """Count one response. Later sequences of an episode with several ones count for the lengths only."""
        right = is_right(record)
        self.num_responses += 1
        tokens = record.get("tokens")
        if isinstance(tokens, int) and tokens >= 0:
            self.lengths[right][bisect_right(EDGES, tokens) - 1] += 1
        group = record.get("group")
        if isinstance(group, int):
            counts = self.groups.setdefault(group, [0, 0])
            counts[0] += 1
            counts[1] += right

    def solve_rates(self) -> list[int]:
        """Return the number of groups in each bin of solve rates; only 0 and 1 themselves are in the outer bins."""
        bins = [0] * RATES
        for responses, right in self.groups.values():
            inner = min(max(round(right / responses * (RATES - 1)), 1), RATES - 2)
            bins[0 if not right else RATES - 1 if right == responses else inner] += 1
        return bins


def is_right(record: Mapping[str, object]) -> bool:
    accuracy = record.get("accuracy")
    return isinstance(accuracy, int | float) and accuracy > SOLVED
