"""Diagnostics of a step's responses: solve rates, lengths of right and wrong answers, advantages. Scalars only, on the
driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mcore_rl.algorithms.filters import groups_with_variance
from mcore_rl.types import Max, Mean, Metric, RolloutScalars

LENGTH_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
SOLVED = 0.5
"""Accuracy above which an answer counts as right."""


def describe_groups(scalars: Sequence[RolloutScalars]) -> dict[str, Metric]:
    """Compute metrics of the solve rates (fraction of right responses) and rewards of all generated groups. scalars:
    one row per episode.

    groups/solve_rate_std is the standard deviation of the solve rate over groups. If it is near 0.5 and
    solved_all + solved_none is near 1, prompts are either too easy or too hard, and few groups have a training signal.
    """
    ids = column(scalars, "group_ids")
    if not len(ids):
        return {}
    group = np.unique(ids, return_inverse=True)[1]
    right = np.bincount(group, column(scalars, "accuracies") > SOLVED) / np.bincount(group)
    rewards = column(scalars, "rewards")
    return {
        "groups/solved_all": fraction(right == 1),
        "groups/solved_none": fraction(right == 0),
        "groups/solve_rate_std": Mean(float(right.std()), 1),
        "reward/std": Mean(float(rewards.std(dtype=np.float64)), 1),
    }


def describe_signal(scalars: Sequence[RolloutScalars], unpunished_tokens: int | None) -> dict[str, Metric]:
    """Compute the fraction of groups without a signal, and whether all responses of the step have the same reward.

    scalars: the responses whose rewards algorithm.baseline compares, one row per episode or per role of an episode.
    Rewards of one role are compared with each other only. groups/all_equal is 1 or 0, and omitted for fewer than two
    responses. It ignores responses longer than `unpunished_tokens`, since their length changes their rewards; None: all
    count.
    """
    rewards, ids = column(scalars, "rewards"), column(scalars, "group_ids")
    if not len(ids):
        return {}
    roles = np.unique(np.concatenate([_roles(part) for part in scalars]), return_inverse=True)[1]
    group = np.unique(ids, return_inverse=True)[1]
    varies = groups_with_variance(rewards, group * (roles.max() + 1) + roles)
    metrics: dict[str, Metric] = {"groups/without_signal": fraction(np.bincount(group, varies) == 0)}
    if unpunished_tokens is not None:
        counted = column(scalars, "response_tokens") <= unpunished_tokens
        rewards, roles = rewards[counted], roles[counted]
    if len(rewards) > 1:
        metrics["groups/all_equal"] = Max(float(not groups_with_variance(rewards, roles).any()))
    return metrics


def _roles(scalars: RolloutScalars) -> np.ndarray:
    return np.full(len(scalars.rewards), "") if scalars.roles is None else scalars.roles


def describe_lengths(scalars: Sequence[RolloutScalars]) -> dict[str, Metric]:
    """Compute quantiles of response lengths, and mean lengths of right and of wrong answers (omitted if there are
    none)."""
    tokens, right = column(scalars, "response_tokens"), column(scalars, "accuracies") > SOLVED
    clipped = column(scalars, "clipped") > 0
    if not len(tokens):
        return {}
    metrics: dict[str, Metric] = {
        f"response_tokens/{name}": Mean(float(np.quantile(tokens, at)), 1) for name, at in LENGTH_QUANTILES.items()
    }
    for side, chosen in (("right", right), ("wrong", ~right)):
        if chosen.any():
            metrics[f"response_tokens/mean_{side}"] = Mean(float(tokens[chosen].sum()), int(chosen.sum()))
            metrics[f"response_tokens/clipped_fraction_{side}"] = fraction(clipped[chosen])
    return metrics


def describe_columns(columns: Sequence[Mapping[str, np.ndarray]], prefix: str = "") -> dict[str, Metric]:
    """Compute the mean of each named column over the responses with a number; the others have NaN.

    columns: the columns of each rollout call, such as the additional numbers of its graders.
    """
    metrics: dict[str, Metric] = {}
    for name in sorted({name for part in columns for name in part}):
        values = np.concatenate([part[name] for part in columns if name in part])
        there = values[~np.isnan(values)]
        metrics[f"{prefix}{name}"] = Mean(float(there.sum(dtype=np.float64)), len(there))
    return metrics


def describe_advantages(advantages: np.ndarray) -> dict[str, Metric]:
    """Compute metrics of the advantages of the trained responses. Shapes: [B]."""
    if not len(advantages):
        return {}
    values = advantages.astype(np.float64)
    return {
        "advantages/mean": Mean(float(values.sum()), len(values)),
        "advantages/std": Mean(float(values.std()), 1),
        "advantages/max": Max(float(values.max())),
        "advantages/min": Mean(float(values.min()), 1),
        "advantages/positive_fraction": fraction(values > 0),
        "advantages/zero_fraction": fraction(values == 0),
    }


def fraction(chosen: np.ndarray) -> Mean:
    return Mean(float(chosen.sum()), len(chosen))


def column(scalars: Sequence[RolloutScalars], name: str) -> np.ndarray:
    parts = [np.asarray(getattr(part, name)) for part in scalars]
    return np.concatenate(parts) if parts else np.empty(0)
