"""Samplers, sources of groups and scalars for tests of collectors and results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mcore_rl.algorithms import groups_with_variance
from mcore_rl.config.algorithm import AlgorithmConfig, DynamicSamplingConfig
from mcore_rl.config.reward import RewardConfig
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.rollout.collector import GroupSource
from mcore_rl.rollout.results import GradingFailures
from mcore_rl.types import Groups, RolloutScalars

FAILURES = GradingFailures(RewardConfig(), print)


class CountingSampler:
    """Samples rows 0, 1, 2, ..., so that the sampled rows are easy to check."""

    def __init__(self) -> None:
        self.next = 0

    def draw(self, count: int) -> np.ndarray:
        rows = np.arange(self.next, self.next + count)
        self.next += count
        return rows


class Digits:
    """Tokenizer that shows token ids."""

    def decode(self, token_ids: Sequence[int], **_: object) -> str:
        return "".join(map(str, token_ids))


def source_of(
    directory: Path,
    size: int,
    rollout: dict[str, Any],
    dynamic: dict[str, Any],
    failures: Any = FAILURES,
    baseline: str = "prompt",
) -> GroupSource:
    """Source of `size` groups per step with rows 0, 1, 2, ..."""
    settings = RolloutConfig(**rollout)
    algorithm = AlgorithmConfig(dynamic_sampling=DynamicSamplingConfig(**dynamic), baseline=baseline)
    return GroupSource(CountingSampler(), settings, algorithm, groups_with_variance, size, 1, directory, failures)


def made_scalars(group_ids: Sequence[int] | np.ndarray, **given: object) -> RolloutScalars:
    """Scalars of responses of one token, with zeros for all that is not given."""
    ids, ones = np.asarray(group_ids, np.int64), np.ones(len(group_ids), np.int32)
    zeros = np.zeros(len(ids), np.float32)
    fields = {"prompt_rows": ids, "total_tokens": ones, "response_tokens": ones, "trained_tokens": ones}
    fields |= {"rewards": zeros, "accuracies": zeros, "clipped": zeros.astype(np.uint8)}
    return RolloutScalars(ids, **fields | {"versions": np.zeros((len(ids), 2), np.int32)} | given)


def drawn_and_dropped(groups: Groups) -> tuple[float, float]:
    """Number of sampled and of dropped groups of a step."""
    return groups.metrics["groups/drawn"].value, groups.metrics["groups/dropped"].value
