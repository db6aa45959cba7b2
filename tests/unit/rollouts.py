"""Scalars of responses, and batches, whose columns have defaults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mcore_rl.types import Batch, RolloutScalars

Numbers = float | Sequence[float] | np.ndarray


def scalars_of(
    group_ids: Sequence[int] | np.ndarray, tokens: Numbers = 7, rewards: Numbers = 0.0, **columns: Any
) -> RolloutScalars:
    """Responses after prompts of 2 tokens. `tokens` and `rewards` are numbers or columns; accuracies equal rewards."""
    ids = np.asarray(group_ids, np.int64)
    lengths = np.zeros(len(ids), np.int32) + np.asarray(tokens, np.int32)
    grades = np.zeros(len(ids), np.float32) + np.asarray(rewards, np.float32)
    defaults: dict[str, Any] = {
        "group_ids": ids,
        "prompt_rows": ids,
        "total_tokens": lengths + np.int32(2),
        "response_tokens": lengths,
        "trained_tokens": lengths,
        "rewards": grades,
        "accuracies": grades.copy(),
        "clipped": np.zeros(len(ids), np.uint8),
        "versions": np.zeros((len(ids), 2), np.int32),
    }
    return RolloutScalars(**{**defaults, **columns})


def batch_of(dp_ranks: Sequence[int] | np.ndarray, num_updates: int = 1, **columns: Any) -> Batch:
    """Samples of 5 tokens, 3 of them trained, one per group."""
    count = len(dp_ranks)
    ints, numbers = np.zeros(count, np.int32), np.zeros(count, np.float32)
    defaults: dict[str, Any] = {
        "chunks": (),
        "chunk_ids": ints,
        "rows": np.arange(count, dtype=np.int32),
        "group_ids": np.arange(count),
        "total_tokens": ints + 5,
        "trained_tokens": ints + 3,
        "rewards": numbers,
        "advantages": numbers,
        "loss_weights": numbers,
        "dp_ranks": np.asarray(dp_ranks, np.int32),
        "updates": tuple(np.array_split(np.arange(count), num_updates)),
    }
    return Batch(**{**defaults, **columns})
