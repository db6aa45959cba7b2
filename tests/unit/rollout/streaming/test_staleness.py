"""Metrics of the age of groups and tokens, and of queues, compared with values computed by hand."""

from __future__ import annotations

import numpy as np

from mcore_rl.rollout.streaming.staleness import QueueLengths, describe_staleness
from mcore_rl.types import Max, Mean, RolloutScalars
from tests.unit.rollout.made import made_scalars


def scalars(versions: list[list[int]], *drawn: tuple[int, int]) -> RolloutScalars:
    """Build scalars with one response per row of `versions`; `drawn`: (version, tokens)."""
    return made_scalars([1] * len(versions), versions=np.array(versions, np.int32), version_tokens=drawn)


def test_describe_staleness_counts_tokens_by_version() -> None:
    parts = [scalars([[3, 5], [3, 3]], (3, 6), (5, 2)), scalars([[5, 5]], (5, 4))]
    metrics = describe_staleness([3, 4], parts, 6)
    assert metrics == {
        "staleness/mean": Mean(5.0, 2),
        "staleness/max": Max(3.0),
        "staleness/mixed_fraction": Mean(1.0, 3),
        "staleness/groups_0": Mean(0.0, 2),
        "staleness/groups_1": Mean(0.0, 2),
        "staleness/groups_2": Mean(1.0, 2),
        "staleness/groups_3": Mean(1.0, 2),
        "staleness/tokens_mean": Mean(6.0 * 3 + 6.0 * 1, 12),
        "staleness/tokens_0": Mean(0.0, 12),
        "staleness/tokens_1": Mean(6.0, 12),
        "staleness/tokens_2": Mean(0.0, 12),
        "staleness/tokens_3": Mean(6.0, 12),
    }


def test_describe_staleness_without_trained_tokens_is_zero() -> None:
    metrics = describe_staleness([1], [scalars([[1, 1]])], 2)
    assert metrics["staleness/tokens_mean"].value == 0
    assert not [name for name in metrics if name.startswith("staleness/tokens_") and name[-1].isdigit()]


def test_queue_lengths_are_time_weighted_means() -> None:
    now, there = 10.0, {"running": 4, "finished": 0}
    queues = QueueLengths(lambda: dict(there), lambda: now)
    now = 12.0
    there.update(running=1, finished=3)
    queues.update()
    now = 15.0
    assert queues.means() == {"running": Mean(2.0 * 4 + 3.0 * 1, 5.0), "finished": Mean(3.0 * 3, 5.0)}
    there.update(running=2)
    queues.update()  # no time has passed
    now = 16.0
    assert queues.means() == {"running": Mean(2.0, 1.0), "finished": Mean(3.0, 1.0)}
