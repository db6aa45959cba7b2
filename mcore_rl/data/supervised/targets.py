"""Trained texts as flat arrays: responses after each prompt, with the tokens that are trained or scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from mcore_rl.data.prompts import PromptSet, joined, trained_chunk
from mcore_rl.data.trajectories import offsets_of
from mcore_rl.types import RolloutScalars, TrajectoryBuffers


@dataclass(frozen=True)
class Target:
    """Tokens after a prompt. Shapes: ids int32 [T], trained uint8 [T], 1 on trained tokens."""

    ids: np.ndarray
    trained: np.ndarray


class Texts(NamedTuple):
    """Responses of one row. margin: number by which the chosen response should be better, for reward models."""

    targets: tuple[Target, ...]
    margin: float = 0.0


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
class TextSet:
    """Prompts with the same number of responses each, or with the rest of a conversation as the only response.

    responses: by position in a row; pairs have the chosen and the rejected one. margins: of pairs, see Texts.

    Shapes: margins float64 [N].
    """

    prompts: PromptSet
    responses: tuple[Targets, ...]
    margins: np.ndarray

    def __len__(self) -> int:
        return len(self.prompts)

    @classmethod
    def joined(cls, sets: Sequence[TextSet]) -> TextSet:
        """Concatenate several sets with the same number of responses."""
        columns = zip(*(each.responses for each in sets), strict=True)
        return cls(
            joined([each.prompts for each in sets]),
            tuple(Targets.joined(column) for column in columns),
            np.concatenate([each.margins for each in sets]),
        )


def text_chunk(data: TextSet, rows: np.ndarray) -> tuple[TrajectoryBuffers, RolloutScalars]:
    """Convert rows to one chunk of trajectories: the responses of a row follow each other and are one group.

    Shapes: rows integer [B]; results [B R] for R responses per row; group ids are [0, B).
    """
    prompts, targets = _texts(data, rows)
    buffers, scalars = trained_chunk(prompts, [target.ids for target in targets], _repeated(data, rows))
    counts = np.array([int(target.trained.sum()) for target in targets], np.int32)
    buffers = replace(buffers, trained=np.concatenate([*(t.trained for t in targets), np.empty(0, np.uint8)]))
    return buffers, replace(scalars, trained_tokens=counts, group_ids=_group_ids(data, rows))


def scored_chunk(data: TextSet, rows: np.ndarray, padding_id: int | None) -> tuple[TrajectoryBuffers, RolloutScalars]:
    """Convert rows to one chunk of trajectories like text_chunk, for a model that scores texts: the only trained
    position of a trajectory is its scored token (scored_part). padding_id: the model's padding token.
    """
    prompts, targets = _texts(data, rows)
    pairs = zip(prompts, targets, strict=True)
    texts = [scored_part(np.concatenate([prompt, target.ids]), padding_id) for prompt, target in pairs]
    # A dummy token, which no rank computes: a predictor is the token before a trained one.
    dummies = [np.zeros(1, np.int32)] * len(texts)
    buffers, scalars = trained_chunk(texts, dummies, _repeated(data, rows))
    return buffers, replace(scalars, total_tokens=buffers.prompt_tokens, group_ids=_group_ids(data, rows))


def scored_part(tokens: np.ndarray, padding_id: int | None) -> np.ndarray:
    """Cut a text after its scored token, the last one that is not the model's padding token, like transformers'
    sequence classification; later tokens do not influence the score. A text of padding tokens only is scored at its
    first token.

    Shapes: integer [S], S >= 1 -> [S'], 1 <= S' <= S.
    """
    last = [len(tokens) - 1] if padding_id is None else np.flatnonzero(tokens != padding_id)
    return tokens[: (int(last[-1]) if len(last) else 0) + 1]


def _texts(data: TextSet, rows: np.ndarray) -> tuple[list[np.ndarray], list[Target]]:
    """Return the prompt of each response, and the response."""
    targets = [targets[row] for row in rows.tolist() for targets in data.responses]
    offsets = data.prompts.offsets
    return [data.prompts.tokens[offsets[row] : offsets[row + 1]] for row in _repeated(data, rows)], targets


def _repeated(data: TextSet, rows: np.ndarray) -> np.ndarray:
    return np.repeat(rows, len(data.responses))


def _group_ids(data: TextSet, rows: np.ndarray) -> np.ndarray:
    return _repeated(data, np.arange(len(rows), dtype=np.int64))
