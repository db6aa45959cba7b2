"""Positions of tokens in time, height and width, for rotations with sections (mrope).

A text token has three equal positions, one more than the largest position before it. The features of an image have its
grid's rows and columns as height and width, counted from the position of the first feature. Example: two text tokens,
an image of 2 x 3 features, a text token:

    time      0 1   2 2 2 2 2 2   5
    height    0 1   2 2 2 3 3 3   5
    width     0 1   2 3 4 2 3 4   5

Source: transformers models/qwen3_vl (5.19), get_rope_index.
"""

from __future__ import annotations

import numpy as np

from mcore_rl.types import PromptImages


def feature_counts(images: PromptImages, merge_size: int) -> np.ndarray:
    """Return the number of features, and so of placeholder tokens, of each image. Shapes: -> int64 [images]."""
    return images.grids.astype(np.int64).prod(axis=1) // merge_size**2


def placeholders(images: PromptImages, merge_size: int) -> np.ndarray:
    """Return the indices of an image's placeholder tokens in the prompt, in the order of the features of all images.
    Shapes: -> int64 [features]."""
    counts = feature_counts(images, merge_size)
    first_features = np.cumsum(counts) - counts
    return np.arange(counts.sum()) + np.repeat(images.starts - first_features, counts)


def token_positions(num_tokens: int, images: PromptImages | None, merge_size: int) -> np.ndarray:
    """Return the positions of a sequence that contains `images`; placeholders that the policy sampled are text.

    Shapes: -> int32 [3, num_tokens].
    """
    parts: list[np.ndarray] = []
    index = position = 0
    # A sequence may end before its images: then no token of the response is trained.
    for start, grid in [] if images is None else zip(images.starts.tolist(), images.grids.tolist(), strict=True):
        merged = (grid[0], grid[1] // merge_size, grid[2] // merge_size)
        parts.append(_text(position, start - index))
        position += start - index
        parts.append(position + np.indices(merged, np.int32).reshape(3, -1))
        index = start + parts[-1].shape[1]
        position += max(merged[1:])
    parts.append(_text(position, max(num_tokens - index, 0)))
    return np.concatenate(parts, axis=1, dtype=np.int32)[:, :num_tokens]


def _text(position: int, num_tokens: int) -> np.ndarray:
    return np.tile(np.arange(position, position + num_tokens, dtype=np.int32), (3, 1))
