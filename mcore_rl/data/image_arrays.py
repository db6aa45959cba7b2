"""Images of trajectories as flat arrays, for files.

image_rows int32 [B], as in TrajectoryBuffers; image_counts int64 [sequences with images], images of each;
image_starts int32 [images of all sequences]; image_indices int32 [images of all sequences], index of each among the
distinct images; image_grids int32 [distinct images, 3]; image_pixels float32 [patches of all distinct images, values of
a patch].
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mcore_rl.types import ProcessedImage, PromptImages, TrajectoryBuffers

COUNTS, PIXELS, GRIDS, STARTS, ROWS = "image_counts", "image_pixels", "image_grids", "image_starts", "image_rows"
INDICES = "image_indices"
DTYPES: dict[str, tuple[type, ...]] = {
    COUNTS: (np.int64,),
    PIXELS: (np.float32,),
    **dict.fromkeys((GRIDS, STARTS, ROWS, INDICES), (np.int32,)),
}
"""Allowed types of the arrays."""


def buffer_arrays(buffers: TrajectoryBuffers) -> dict[str, np.ndarray]:
    """Return all arrays of trajectories by name, and the arrays of their images."""
    # A single temperature may be a NumPy scalar instead of an array.
    arrays = {name: array for name, array in vars(buffers).items() if name != "images" and array is not None}
    if not buffers.images:
        return arrays
    # Responses with answers of tools have the images of their prompt in common.
    distinct = {image.digest: image for each in buffers.images for image in each.images}
    numbers = {digest: number for number, digest in enumerate(distinct)}
    return arrays | {
        COUNTS: np.array([len(each.images) for each in buffers.images], np.int64),
        PIXELS: np.concatenate([image.pixels for image in distinct.values()]),
        GRIDS: np.stack([image.grid for image in distinct.values()]),
        STARTS: np.concatenate([each.starts for each in buffers.images]),
        INDICES: np.array([numbers[image.digest] for each in buffers.images for image in each.images], np.int32),
    }


def array_buffers(arrays: Mapping[str, np.ndarray]) -> TrajectoryBuffers:
    """Return the trajectories that `buffer_arrays` took apart.

    Raises: TypeError for missing or unknown arrays; ValueError for images that do not belong together.
    """
    given = {name: array for name, array in arrays.items() if name not in (COUNTS, PIXELS, GRIDS, STARTS, INDICES)}
    if ROWS not in given:
        return TrajectoryBuffers(**given)  # type: ignore[arg-type]
    if missing := {COUNTS, PIXELS, GRIDS, STARTS} - arrays.keys():
        raise ValueError(f"{sorted(missing)[0]} is missing")
    counts, grids, starts, pixels = (arrays[name] for name in (COUNTS, GRIDS, STARTS, PIXELS))
    # Files of earlier versions have every image once per prompt.
    indices = arrays.get(INDICES, np.arange(len(grids)))
    rows = given[ROWS]
    patches = grids.astype(np.int64).prod(axis=-1)
    if counts.sum() != len(indices) or len(starts) != len(indices) or patches.sum() != len(pixels):
        raise ValueError("grids, places and pixels of the images do not belong together")
    if len(indices) and not 0 <= indices.min() <= indices.max() < len(grids):
        raise ValueError(f"{INDICES} names images that are missing")
    if len(rows) and not -1 <= rows.min() <= rows.max() < len(counts):
        raise ValueError(f"{ROWS} names images that are missing")
    parts = zip(np.split(pixels, np.cumsum(patches)[:-1]), grids, strict=True)
    distinct = [ProcessedImage.of(part, grid) for part, grid in parts]
    ends = np.cumsum(counts)[:-1]
    images = tuple(
        PromptImages(tuple(distinct[index] for index in chosen), of_sequence)
        for chosen, of_sequence in zip(np.split(indices, ends), np.split(starts, ends), strict=True)
    )
    return TrajectoryBuffers(**given, images=images)  # type: ignore[arg-type]
