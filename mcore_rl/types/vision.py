"""Images of prompts, as a vision tower reads them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

ImageSource = bytes | str
"""Encoded image, such as the bytes of a PNG file, or the path of its file."""


@dataclass(frozen=True)
class PromptImages:
    """Processed images of one prompt, shared by all of its responses.

    An image of a grid (t, h, w) has t * h * w patches; the tower merges merge_size x merge_size patches into one
    feature. In the prompt, each image has one placeholder token per feature, in consecutive positions.

    Shapes: pixels float32 [patches of all images, values of a patch]; grids int32 [images, 3], patches in time, height
    and width; starts int32 [images], index of each image's first placeholder token in the prompt.
    digest: checksum of the pixels and grids. Equal images in several prompts have equal digests.
    """

    pixels: np.ndarray
    grids: np.ndarray
    starts: np.ndarray
    digest: str

    @classmethod
    def of(cls, pixels: np.ndarray, grids: np.ndarray, starts: np.ndarray) -> PromptImages:
        """Return the images with their digest."""
        digest = hashlib.blake2b(grids.tobytes(), digest_size=16)
        digest.update(pixels.tobytes())
        return cls(pixels, grids, starts, digest.hexdigest())
