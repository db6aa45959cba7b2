"""Samplers and scalars for tests of collectors and results."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mcore_rl.types import RolloutScalars


class CountingSampler:
    """Samples rows 0, 1, 2, ..., so that the sampled rows are easy to check."""

    def __init__(self) -> None:
        self.next = 0

    def draw(self, count: int) -> np.ndarray:
        rows = np.arange(self.next, self.next + count)
        self.next += count
        return rows


def made_scalars(group_ids: Sequence[int] | np.ndarray, **given: object) -> RolloutScalars:
    """Scalars of responses of one token, with zeros for all that is not given."""
    ids, ones = np.asarray(group_ids, np.int64), np.ones(len(group_ids), np.int32)
    zeros = np.zeros(len(ids), np.float32)
    fields = {"prompt_rows": ids, "total_tokens": ones, "response_tokens": ones, "trained_tokens": ones}
    fields |= {"rewards": zeros, "accuracies": zeros, "clipped": zeros.astype(np.uint8)}
    return RolloutScalars(ids, **fields | {"versions": np.zeros((len(ids), 2), np.int32)} | given)
