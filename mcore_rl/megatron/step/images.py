"""Images of a packed row: the positions of its tokens, and the places of the images' features."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mcore_rl.errors import DataError
from mcore_rl.megatron.model.attention.context import ContextPart
from mcore_rl.megatron.model.vision.tower import RowImages
from mcore_rl.types import ProcessedImage, PromptImages
from mcore_rl.vision.positions import feature_counts, placeholders, token_positions
from model_converters.families.parts.vision import VisionArguments


def image_inputs(
    sequences: Sequence[np.ndarray],
    images: Sequence[PromptImages | None],
    row_lengths: Sequence[int],
    vision: VisionArguments | None,
    part: ContextPart,
) -> tuple[np.ndarray | None, RowImages | None]:
    """Return the positions of the row's tokens on all context-parallel ranks, and its images; None for both if no
    prompt has any.

    sequences, images: computed tokens, int32 [S], and images of each sequence. row_lengths: lengths with padding, which
    may be one sequence more.

    Shapes: positions int32 [3, sum of row_lengths].
    Raises: DataError for images of a model without vision tower, and for images that do not fit the tokens.
    """
    if not any(found is not None for found in images):
        return None, None
    if vision is None:
        raise DataError("the trajectories have images, but the model has no vision tower; use a model with one")
    starts = np.cumsum([0, *row_lengths])[:-1]
    padded = [*images, *[None] * (len(row_lengths) - len(images))]
    positions = [
        token_positions(length, found, vision.merge_size) for length, found in zip(row_lengths, padded, strict=True)
    ]
    first_features: dict[str, int] = {}
    distinct: list[ProcessedImage] = []
    sources, places, computed, total = [], [], [], 0
    for tokens, found, start in zip(sequences, images, starts, strict=False):
        if found is None:
            continue
        indices = placeholders(found, vision.merge_size)
        _check(tokens, found, indices, vision)
        counts = feature_counts(found, vision.merge_size)
        for image, count in zip(found.images, counts.tolist(), strict=True):
            # Once per image: responses with answers of tools share the images of their prompt only.
            if image.digest not in first_features:
                first_features[image.digest] = total
                total += count
                distinct.append(image)
            sources.append(first_features[image.digest] + np.arange(count))
        # Tokens of the sequence after its last trained one are not computed.
        inside = indices < len(tokens)
        computed.append(inside)
        places.append(start + indices)
    inside = np.concatenate(computed)
    row_places, row_sources = np.concatenate(places)[inside], np.concatenate(sources)[inside]
    if part.size > 1:
        row_places, row_sources = _part(row_places, row_sources, row_lengths, part)
    return np.concatenate(positions, axis=1), RowImages(
        pixels=tuple(torch.from_numpy(found.pixels) for found in distinct),
        grids=torch.from_numpy(np.stack([found.grid for found in distinct]).astype(np.int64)),
        sources=torch.from_numpy(row_sources),
        places=torch.from_numpy(row_places),
    )


def _part(
    places: np.ndarray, sources: np.ndarray, row_lengths: Sequence[int], part: ContextPart
) -> tuple[np.ndarray, np.ndarray]:
    """Return the places in this context-parallel rank's row, and the sources, of the placeholders that it holds."""
    indices = part.row_indices(torch.tensor(row_lengths)).numpy()
    place_on_rank = np.full(sum(row_lengths), -1)
    place_on_rank[indices] = np.arange(len(indices))
    mine = place_on_rank[places]
    return mine[mine >= 0], sources[mine >= 0]


def _check(tokens: np.ndarray, images: PromptImages, indices: np.ndarray, vision: VisionArguments) -> None:
    """Raise DataError if pixels, grids and placeholder tokens do not belong together."""
    for image in images.images:
        patches = int(image.grid.astype(np.int64).prod())
        if image.pixels.shape != (patches, vision.patch_values):
            raise DataError(
                f"image {image.digest}: pixels have shape {list(image.pixels.shape)}, but the grid and the model need "
                f"[{patches}, {vision.patch_values}]"
            )
    computed = indices[indices < len(tokens)]
    if (tokens[computed] != vision.image_token).any():
        raise DataError(
            f"images {images.digest}: some tokens at the images' places are not image_token_id {vision.image_token}; "
            "the prompt was tokenized for other images"
        )
