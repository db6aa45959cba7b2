"""Trained texts as flat arrays: a response after each prompt, with the tokens that are trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mcore_rl.data.prompts import PromptSet, trained_chunk
from mcore_rl.data.trajectories import offsets_of
from mcore_rl.types import RolloutScalars, TrajectoryBuffers


@dataclass(frozen=True)
class Target:
    """Tokens after a prompt. Shapes: ids int32 [T], trained uint8 [T], 1 on trained tokens."""

    ids: np.ndarray
    trained: np.ndarray


@dataclass(frozen=True)
class Targets:
    """Targets of N rows. Shapes: ids int32 [sum T]; trained uint8 [sum T]; offsets int64 [N + 1]."""

    ids: np.ndarray
    trained: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(cls, targets: Sequence[Target]) -> Targets:
        return cls(
            np.concatenate([*(target.ids for target in targets), np.empty(0, np.int32)]).astype(np.int32, copy=False),
            np.concatenate([*(target.trained for target in targets), np.empty(0, np.uint8)]).astype(
                np.uint8, copy=False
            ),
            offsets_of([len(target.ids) for target in targets]),
        )

    @classmethod
    def joined(cls, parts: Sequence[Targets]) -> Targets:
        """Concatenate the targets of several sets."""
        return cls.of([part[row] for part in parts for row in range(len(part.offsets) - 1)])

    def __getitem__(self, row: int) -> Target:
        run = slice(int(self.offsets[row]), int(self.offsets[row + 1]))
        return Target(self.ids[run], self.trained[run])


@dataclass(frozen=True)
class PairSet:
    """Prompts with a chosen and a rejected response each."""

    prompts: PromptSet
    chosen: Targets
    rejected: Targets

    def __len__(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True)
class ConversationSet:
    """Prompts with the rest of each conversation. `targets`: only turns of the assistant are trained."""

    prompts: PromptSet
    targets: Targets

    def __len__(self) -> int:
        return len(self.prompts)


def conversation_chunk(data: ConversationSet, rows: np.ndarray) -> tuple[TrajectoryBuffers, RolloutScalars]:
    """Convert rows to one chunk of trajectories, each a group of its own.

    Shapes: rows integer [B]; group ids are [0, B).
    """
    prompts = [data.prompts.tokens[a:b] for a, b in _bounds(data.prompts.offsets, rows)]
    targets = [data.targets[row] for row in rows.tolist()]
    return _masked_chunk(prompts, targets, rows, np.arange(len(rows), dtype=np.int64))


def pair_chunk(data: PairSet, rows: np.ndarray) -> tuple[TrajectoryBuffers, RolloutScalars]:
    """Convert pairs to one chunk of trajectories: for each row its chosen, then its rejected response, in one group.

    Shapes: rows integer [P]; results [2 P]; group ids are [0, P).
    """
    both = [target for row in rows.tolist() for target in (data.chosen[row], data.rejected[row])]
    prompts = [data.prompts.tokens[a:b] for a, b in _bounds(data.prompts.offsets, np.repeat(rows, 2))]
    return _masked_chunk(prompts, both, np.repeat(rows, 2), np.repeat(np.arange(len(rows), dtype=np.int64), 2))


def _masked_chunk(
    prompts: Sequence[np.ndarray], targets: Sequence[Target], rows: np.ndarray, group_ids: np.ndarray
) -> tuple[TrajectoryBuffers, RolloutScalars]:
    buffers, scalars = trained_chunk(prompts, [target.ids for target in targets], rows)
    counts = np.array([int(target.trained.sum()) for target in targets], np.int32)
    buffers = replace(buffers, trained=np.concatenate([*(t.trained for t in targets), np.empty(0, np.uint8)]))
    return buffers, replace(scalars, trained_tokens=counts, group_ids=group_ids)


def _bounds(offsets: np.ndarray, rows: np.ndarray) -> list[tuple[int, int]]:
    return list(zip(offsets[rows].tolist(), offsets[rows + 1].tolist(), strict=True))
