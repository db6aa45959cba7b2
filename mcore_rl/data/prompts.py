"""Sets of tokenised prompts as flat arrays, with target texts for supervised training, and the report of loading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np

from mcore_rl.data.trajectories import distinct_images, hint_arrays, offsets_of, ragged_tokens
from mcore_rl.types import Prompt, PromptImages, RolloutScalars, TrajectoryBuffers
from mcore_rl.vision.processor import ImageProcessor

COLUMNS = tuple(each.name for each in fields(Prompt) if each.name not in ("row", "token_ids", "hint_ids"))
"""Fields of Prompt that are stored as lists: all after row and token_ids, except the last one, hint_ids."""


@dataclass(frozen=True)
class PromptSet:
    """Tokenised prompts as flat arrays and plain values, to be stored once in Ray's object store.

    columns: the N values of each field of Prompt in COLUMNS, in that order.

    Shapes: tokens int32 [sum P]; offsets int64 [N + 1]; hint_tokens int32 [sum H], hint_offsets int64 [N + 1], prompts
    with hints; None: hints were not read.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    columns: dict[str, list[Any]]
    hint_tokens: np.ndarray | None = None
    hint_offsets: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Prompt:
        # A negative row would select another prompt. The IndexError also ends iteration, as there is no __iter__.
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of a prompt set with {len(self)} rows")
        token_ids = self.tokens[self.offsets[row] : self.offsets[row + 1]]
        hint_ids = None
        if self.hint_tokens is not None and self.hint_offsets is not None:
            hint_ids = self.hint_tokens[self.hint_offsets[row] : self.hint_offsets[row + 1]]
        # Positional arguments: a curriculum may read a million rows, and keywords take 30 % longer.
        return Prompt(int(row), token_ids, *(*map(itemgetter(row), self.columns.values()), hint_ids))

    @property
    def has_images(self) -> bool:
        return any(self.columns["images"])

    def take(self, rows: Sequence[int] | np.ndarray) -> PromptSet:
        """Return a set of these rows in this order, renumbered from 0."""
        return prompt_set([self[int(row)] for row in rows])


@dataclass(frozen=True)
class LoadReport:
    """Summary of reading one or more files.

    dropped, truncated: rows above a token limit that were dropped or shortened.
    limits: the exceeded limits, with the number of rows.
    longest_tokens: longest prompt before truncation.
    notes: rows that were converted or partly ignored, with their number.
    of_files: rows kept per file; a set contains the files in order.
    """

    key: str
    path: str
    kept: int
    dropped: int
    longest_tokens: int
    limits: str
    truncated: int = 0
    notes: tuple[str, ...] = ()
    of_files: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.truncated:
            exceeding = f"{self.truncated} truncated ({self.limits})"
        else:
            exceeding = f"{self.dropped} dropped ({self.limits})" if self.dropped else "none dropped"
        read = f"{self.key}: {self.kept} rows from {self.path}, {exceeding}"
        return "; ".join((read, f"longest prompt {self.longest_tokens} tokens", *self.notes))


def prompt_set(prompts: Sequence[Prompt]) -> PromptSet:
    """Join prompts into flat arrays."""
    tokens, offsets = ragged_tokens([prompt.token_ids for prompt in prompts])
    columns = {name: list(map(attrgetter(name), prompts)) for name in COLUMNS}
    return PromptSet(tokens, offsets, columns, *hint_arrays([prompt.hint_ids for prompt in prompts]))


def joined(sets: Sequence[PromptSet]) -> PromptSet:
    """Concatenate several sets."""
    return sets[0] if len(sets) == 1 else prompt_set([each[row] for each in sets for row in range(len(each))])


@dataclass(frozen=True)
class SupervisedSet:
    """Tokenised prompts with their targets; a target ends with the end-of-sequence token.

    images: image processor of a model that reads images.

    Shapes: target_tokens int32 [sum T]; target_offsets int64 [N + 1].
    """

    prompts: PromptSet
    target_tokens: np.ndarray
    target_offsets: np.ndarray
    images: ImageProcessor | None = None

    def __len__(self) -> int:
        return len(self.prompts)

    def images_of(self, row: int) -> PromptImages | None:
        """Read and process the images of a row.

        Raises: DataError for an image that cannot be read.
        """
        sources = self.prompts.columns["images"][row]
        if not sources or self.images is None:
            return None
        return self.images.process(sources, self.prompts[row].token_ids, f"prompt {row + 1} of train")


def supervised_chunk(data: SupervisedSet, rows: np.ndarray) -> tuple[TrajectoryBuffers, RolloutScalars]:
    """Convert rows to one chunk of trajectories, with one group per row. Only targets are trained.

    Log-probabilities of a sampling policy do not exist and are 0, as are versions, rewards and accuracies.

    Shapes: rows integer [B]; group ids are [0, B).
    """
    prompts = [data.prompts.tokens[a:b] for a, b in _bounds(data.prompts.offsets, rows)]
    targets = [data.target_tokens[a:b] for a, b in _bounds(data.target_offsets, rows)]
    return trained_chunk(prompts, targets, rows, images=[data.images_of(int(row)) for row in rows])


def trained_chunk(
    prompts: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
    rows: np.ndarray,
    logp: np.ndarray | None = None,
    images: Sequence[PromptImages | None] = (),
) -> tuple[TrajectoryBuffers, RolloutScalars]:
    """Build a chunk in which all target tokens are trained, with one group per row.

    `logp` are the log-probabilities of the target tokens, by default 0. `images` of each prompt, by default none.
    """
    distinct, image_rows = distinct_images(images)
    prompt_tokens = np.array([len(prompt) for prompt in prompts], np.int32)
    target_tokens = np.array([len(target) for target in targets], np.int32)
    # In the flat layout, the target of a row follows its prompt.
    pieces = [piece for pair in zip(prompts, targets, strict=True) for piece in pair]
    num_trained = int(target_tokens.sum())
    buffers = TrajectoryBuffers(
        tokens=np.concatenate([*pieces, np.empty(0, np.int32)], dtype=np.int32),
        token_offsets=offsets_of(prompt_tokens + target_tokens),
        prompt_tokens=prompt_tokens,
        response_offsets=offsets_of(target_tokens),
        logp_rollout=np.zeros(num_trained, np.float32) if logp is None else logp,
        versions=np.zeros(num_trained, np.int32),
        trained=np.ones(num_trained, np.uint8),
        images=distinct,
        image_rows=image_rows,
    )
    zeros = np.zeros(len(rows), np.float32)
    scalars = RolloutScalars(
        group_ids=np.arange(len(rows), dtype=np.int64),
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
