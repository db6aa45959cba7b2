"""Curves of the metrics: their charts, and their reduction to a bounded number of points."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MAX_BUCKETS = 1000
"""Longer runs are divided into this number of buckets of consecutive steps."""
MAX_VALUES = 300_000
"""Limit of the numbers of a report, about 2 MB; with more metrics or runs, there are fewer buckets."""


@dataclass(frozen=True)
class Chart:
    """Metrics in one chart. A pattern that ends with * stands for the metrics with this prefix that no chart names."""

    title: str
    unit: str
    patterns: tuple[str, ...]


CHARTS = (
    Chart("Reward", "", ("reward/mean", "reward/std", "reward/greedy", "val/reward")),
    Chart("Accuracy", "fraction", ("val/accuracy", "val/accuracy/*", "reward/accuracy")),
    Chart("Accuracy on pairs", "fraction", ("preference/accuracy",)),
    Chart("Margin", "nats", ("preference/margin", "val/margin", "val/margin/*")),
    Chart("Rewards of pairs", "nats", ("preference/chosen_reward", "preference/rejected_reward", "val/chosen_reward")),
    Chart("Parts of the reward", "", ("reward/*",)),
    Chart(
        "Response length",
        "tokens",
        (
            *("response_tokens/mean", "response_tokens/p50", "response_tokens/p90", "response_tokens/max"),
            *("response_tokens/mean_right", "response_tokens/mean_wrong", "val/response_tokens"),
        ),
    ),
    Chart(
        "Truncated responses",
        "fraction",
        ("response_tokens/clipped_fraction", "response_tokens/clipped_fraction_*"),
    ),
    Chart("Groups", "fraction", ("groups/solved_all", "groups/solved_none", "groups/without_signal")),
    Chart("Entropy", "nats", ("actor/entropy",)),
    Chart("KL divergence", "nats", ("actor/ppo_kl", "actor/kl_reference", "rollout/kl", "reward/kl")),
    Chart("Clip fractions", "fraction", ("actor/clip_fraction", "actor/clip_fraction_*", "actor/dual_clip_fraction")),
    Chart("Gradient norm", "", ("actor/grad_norm", "critic/grad_norm")),
    Chart("Gradient norm by kind", "", ("actor/grad_norm_*",)),
    # Apart from the largest difference, beside which the mean would be a flat line.
    Chart("Engine - trainer", "nats", ("rollout/logp_diff_mean", "rollout/logp_diff_fresh_mean")),
    Chart("Largest engine - trainer", "nats", ("rollout/logp_diff_max",)),
    Chart("Staleness", "versions", ("staleness/mean", "staleness/max", "staleness/tokens_mean")),
    Chart("Idle time", "fraction", ("time/trainer_idle_fraction", "time/generator_idle_fraction", "engine/idle_*")),
    Chart("Throughput", "tokens/s", ("throughput/*",)),
    Chart(
        "Time per phase",
        "s",
        ("time/step", "time/rollout", "time/logp", "time/update", "time/weight_sync", "time/validate"),
    ),
    Chart("Memory", "bytes", ("memory/*",)),
    Chart("Loss", "", ("actor/loss", "critic/loss", "val/loss")),
    Chart("Critic", "", ("critic/*",)),
    Chart("Responses without a grade", "", ("reward/errors", "val/errors")),
)


@dataclass(frozen=True)
class Series:
    """Metrics at common steps; None if a step has no value."""

    steps: list[int]
    values: dict[str, list[float | None]]


def series_of(records: Mapping[int, Mapping[str, float | None]], num_runs: int = 1) -> Series:
    """Reduce the records of a run, ordered by step, to at most 2 * MAX_BUCKETS points.

    A bucket has two points with the lowest and the highest value of each metric, in the order of their steps, so that
    peaks stay visible.
    """
    names = sorted({name for record in records.values() for name in record})
    most = max(2, min(MAX_BUCKETS, MAX_VALUES // (2 * max(len(names), 1) * num_runs)))
    steps = list(records)
    columns = {name: [_short(records[step].get(name)) for step in steps] for name in names}
    if len(steps) <= 2 * most:
        return Series(steps, columns)
    edges = [round(place * len(steps) / most) for place in range(most + 1)]
    buckets = [range(first, end) for first, end in itertools.pairwise(edges)]
    kept = [steps[place] for bucket in buckets for place in (bucket[0], bucket[-1])]
    return Series(kept, {name: [v for b in buckets for v in _extremes(c, b)] for name, c in columns.items()})


def _extremes(column: Sequence[float | None], bucket: range) -> tuple[float | None, float | None]:
    known = [(value, place) for place in bucket if (value := column[place]) is not None]
    if not known:
        return None, None
    low, high = min(known), max(known)
    return (low[0], high[0]) if low[1] <= high[1] else (high[0], low[0])


def _short(value: float | None) -> float | None:
    """Round to 6 digits, which is below the width of a line."""
    return None if value is None else float(f"{value:.6g}")
