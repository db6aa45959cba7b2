"""Images of trajectories as flat arrays, for files.

image_rows int32 [B], as in TrajectoryBuffers; image_counts int64 [prompts with images], images of each;
image_pixels float32 [patches of all, values of a patch]; image_grids int32 [all images, 3]; image_starts int32
[all images].
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mcore_rl.types import PromptImages, TrajectoryBuffers

COUNTS, PIXELS, GRIDS, STARTS, ROWS = "image_counts", "image_pixels", "image_grids", "image_starts", "image_rows"
DTYPES: dict[str, tuple[type, ...]] = {
    COUNTS: (np.int64,),
    PIXELS: (np.float32,),
    **dict.fromkeys((GRIDS, STARTS, ROWS), (np.int32,)),
}
"""Allowed types of the arrays."""


def buffer_arrays(buffers: TrajectoryBuffers) -> dict[str, np.ndarray]:
    """Return all arrays of trajectories by name, and the arrays of their images."""
    # A single temperature may be a NumPy scalar instead of an array.
    arrays = {name: array for name, array in vars(buffers).items() if name != "images" and array is not None}
    if not buffers.images:
        return arrays
    return arrays | {
        COUNTS: np.array([len(each.grids) for each in buffers.images], np.int64),
        PIXELS: np.concatenate([each.pixels for each in buffers.images]),
        GRIDS: np.concatenate([each.grids for each in buffers.images]),
        STARTS: np.concatenate([each.starts for each in buffers.images]),
    }


def array_buffers(arrays: Mapping[str, np.ndarray]) -> TrajectoryBuffers:
    """Return the trajectories that `buffer_arrays` took apart.

    Raises: TypeError for missing or unknown arrays; ValueError for images that do not belong together.
    """
    given = {name: array for name, array in arrays.items() if name not in (COUNTS, PIXELS, GRIDS, STARTS)}
    if ROWS not in given:
        return TrajectoryBuffers(**given)  # type: ignore[arg-type]
    if missing := {COUNTS, PIXELS, GRIDS, STARTS} - arrays.keys():
        raise ValueError(f"{sorted(missing)[0]} is missing")
    counts, grids, starts, pixels = (arrays[name] for name in (COUNTS, GRIDS, STARTS, PIXELS))
    rows = given[ROWS]
    patches = grids.astype(np.int64).prod(axis=-1)
    if counts.sum() != len(grids) or len(starts) != len(grids) or patches.sum() != len(pixels):
        raise ValueError("grids, places and pixels of the images do not belong together")
    if len(rows) and not -1 <= rows.min() <= rows.max() < len(counts):
        raise ValueError(f"{ROWS} names images that are missing")
    ends = np.cumsum(counts)[:-1]
    of_prompts = zip(np.split(grids, ends), np.split(starts, ends), np.split(patches, ends), strict=True)
    images, first = [], 0
    for prompt_grids, prompt_starts, prompt_patches in of_prompts:
        last = first + int(prompt_patches.sum())
        images.append(PromptImages.of(pixels[first:last], prompt_grids, prompt_starts))
        first = last
    return TrajectoryBuffers(**given, images=tuple(images))  # type: ignore[arg-type]
