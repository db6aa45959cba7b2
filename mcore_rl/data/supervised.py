"""Prompts with target texts, in the buffers that rollouts use, so that supervised training uses the same actor."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mcore_rl.data.prompts import PromptSet
from mcore_rl.data.trajectories import offsets_of
from mcore_rl.types import RolloutScalars, TrajectoryBuffers


@dataclass(frozen=True)
class SupervisedSet:
    """Tokenised prompts with their targets; a target ends with the end-of-sequence token.

    Shapes: target_tokens int32 [sum T]; target_offsets int64 [N + 1].
    """

    prompts: PromptSet
    target_tokens: np.ndarray
    target_offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.prompts)


def supervised_chunk(
    data: SupervisedSet, rows: np.ndarray, *, first_group: int = 0
) -> tuple[TrajectoryBuffers, RolloutScalars]:
    """Convert rows to one chunk of trajectories, with one group per row. Only targets are trained.

    Log-probabilities of a sampling policy do not exist and are 0, as are versions, rewards and accuracies.

    Shapes: rows integer [B]; group ids are [first_group, first_group + B).
    """
    prompts = [data.prompts.tokens[a:b] for a, b in _bounds(data.prompts.offsets, rows)]
    targets = [data.target_tokens[a:b] for a, b in _bounds(data.target_offsets, rows)]
    prompt_tokens = np.array([len(prompt) for prompt in prompts], np.int32)
    target_tokens = np.array([len(target) for target in targets], np.int32)
    pieces = [piece for pair in zip(prompts, targets, strict=True) for piece in pair]
    num_trained = int(target_tokens.sum())
    buffers = TrajectoryBuffers(
        tokens=np.concatenate([*pieces, np.empty(0, np.int32)]),
        token_offsets=offsets_of(prompt_tokens + target_tokens),
        prompt_tokens=prompt_tokens,
        response_offsets=offsets_of(target_tokens),
        logp_rollout=np.zeros(num_trained, np.float32),
        versions=np.zeros(num_trained, np.int32),
        trained=np.ones(num_trained, np.uint8),
    )
    zeros = np.zeros(len(rows), np.float32)
    scalars = RolloutScalars(
        group_ids=np.arange(first_group, first_group + len(rows), dtype=np.int64),
        prompt_rows=np.asarray(rows, np.int64),
        total_tokens=prompt_tokens + target_tokens,
        response_tokens=target_tokens,
        trained_tokens=target_tokens,
        rewards=zeros,
        accuracies=zeros,
        clipped=np.zeros(len(rows), np.uint8),
        versions=np.zeros((len(rows), 2), np.int32),
    )
    return buffers, scalars


def _bounds(offsets: np.ndarray, rows: np.ndarray) -> list[tuple[int, int]]:
    rows = np.asarray(rows, np.int64)
    return list(zip(offsets[rows].tolist(), offsets[rows + 1].tolist(), strict=True))
