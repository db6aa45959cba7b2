"""Images of tools are decoded in the formats that the tool process has checked, whatever else their bytes are."""

from __future__ import annotations

import base64
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mcore_rl.errors import DataError
from mcore_rl.vision.processor import ImageProcessor
from mcore_rl.vision.sources import read_image
from mcore_rl.vision.thumbnails import thumbnails, with_thumbnails

PCD_START, PCD_BYTES = 2048, 800 * 2048


class FakeProcessor:
    """Image processor that records the sizes of images."""

    merge_size = 1

    def __init__(self) -> None:
        self.sizes: list[tuple[int, int]] = []

    def get_number_of_image_patches(self, height: int, width: int) -> int:
        return 1

    def preprocess(self, images: Any, *, return_tensors: str) -> dict[str, np.ndarray]:
        self.sizes += [image.size for image in images]
        grids = np.ones((len(images), 3), np.int32)
        return {"pixel_values": np.zeros((len(images), 6), np.float32), "image_grid_thw": grids}


@pytest.fixture(scope="module")
def ambiguous() -> bytes:
    """A WebP file of 16 x 8 pixels, which is a PCD file of 768 x 512 pixels, too."""
    file = BytesIO()
    Image.new("RGB", (16, 8), (255, 0, 0)).save(file, "WEBP", lossless=True)
    return (file.getvalue().ljust(PCD_START, b"\0") + b"PCD_").ljust(PCD_BYTES, b"\0")


def test_images_of_tools_have_the_checked_formats(ambiguous: bytes) -> None:
    assert read_image(ambiguous, "row").size == (768, 512)
    fake = FakeProcessor()
    processor = ImageProcessor(1, "", fake)
    processor.process_images([ambiguous], "tool")
    processor.process([ambiguous], np.ones(1, np.int32), "row")
    assert fake.sizes == [(16, 8), (768, 512)]
    tiff = BytesIO()
    Image.new("RGB", (16, 8)).save(tiff, "TIFF")
    with pytest.raises(DataError, match=r"tool: image 1: an image of .* bytes cannot be read"):
        processor.process_images([tiff.getvalue()], "tool")


def test_thumbnails_of_tools_have_the_checked_formats(ambiguous: bytes) -> None:
    content: Any = [{"type": "image", "image": ambiguous}]
    (shown,) = with_thumbnails([{"role": "tool", "content": content}])
    (part,) = shown["content"]  # type: ignore[misc, attr-defined]
    uris = [part["image"], *thumbnails([ambiguous])]
    sizes = [Image.open(BytesIO(base64.b64decode(uri.partition(",")[2]))).size for uri in uris]
    assert sizes == [(16, 8), (128, 85)]
