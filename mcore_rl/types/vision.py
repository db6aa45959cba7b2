"""Images of prompts, as a vision tower reads them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


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
