"""Images of prompts and of answers of tools, as a vision tower reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ImageSource = bytes | str
"""Encoded image, such as the bytes of a PNG file, or the path of its file."""


@dataclass(frozen=True)
class ProcessedImage:
    """Patches of one image, shared by all sequences that contain it.

    An image of a grid (t, h, w) has t * h * w patches; the tower merges merge_size x merge_size patches into one
    feature.

    Shapes: pixels float32 [patches, values of a patch]; grid int32 [3], patches in time, height and width.
    digest: checksum of the pixels and the grid.
    """

    pixels: np.ndarray
    grid: np.ndarray
    digest: str

    @classmethod
    def of(cls, pixels: np.ndarray, grid: np.ndarray) -> ProcessedImage:
        """Return the image with its digest."""
        digest = hashlib.blake2b(grid.tobytes(), digest_size=16)
        digest.update(pixels.tobytes())
        return cls(pixels, grid, digest.hexdigest())

    def num_features(self, merge_size: int) -> int:
        """Return the number of features, and so of placeholder tokens."""
        return int(self.grid.astype(np.int64).prod()) // merge_size**2


@dataclass(frozen=True)
class PromptImages:
    """Processed images of a prompt, and of the answers of tools that follow it in a sequence.

    All responses to a prompt share them, unless tools answer with images. Each image has one placeholder token per
    feature, in consecutive positions.

    Shapes: starts int32 [images], index of each image's first placeholder token in the sequence, ascending.
    """

    images: tuple[ProcessedImage, ...]
    starts: np.ndarray

    @classmethod
    def of(cls, pixels: np.ndarray, grids: np.ndarray, starts: np.ndarray) -> PromptImages:
        """Return the images whose patches follow each other in `pixels`.

        Shapes: pixels float32 [patches of all images, values of a patch]; grids int32 [images, 3].
        """
        ends = np.cumsum(grids.astype(np.int64).prod(axis=1))[:-1]
        parts = zip(np.split(pixels, ends), grids, strict=True)
        return cls(tuple(ProcessedImage.of(part, grid) for part, grid in parts), starts)

    @property
    def grids(self) -> np.ndarray:
        """Grids of all images, int32 [images, 3]."""
        return np.stack([image.grid for image in self.images])

    @property
    def pixels(self) -> np.ndarray:
        """Patches of all images, float32 [patches of all images, values of a patch]."""
        return np.concatenate([image.pixels for image in self.images])

    @property
    def digest(self) -> str:
        """Checksum of the images in their order. Equal images in several prompts have equal digests."""
        return ".".join(image.digest for image in self.images)

    def followed_by(self, images: Sequence[ProcessedImage], starts: Sequence[int]) -> PromptImages:
        """Return these images and further ones of the same sequence, which begin at the tokens `starts`."""
        return PromptImages((*self.images, *images), np.concatenate([self.starts, np.array(starts, np.int32)]))


NO_IMAGES = PromptImages((), np.empty(0, np.int32))
"""Beginning of a sequence without images."""
