"""Images in results of tools: their forms, and the limits that the tool process checks.

Results come from code and servers that may follow the model's wishes. An image is therefore never a path or an address,
only a few formats are read, and it is decoded once here, in the tool process, before the engine's process decodes it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Protocol, runtime_checkable

from mcore_rl.vision.sources import TOOL_FORMATS

MAX_BYTES = 16 << 20
"""Size of an encoded image."""
MAX_PIXELS = 32 << 20
"""Pixels of an image; it is decoded to three bytes each."""


PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
"""Modes of Pillow with at most 8 bits per value that a PNG file can have."""


@runtime_checkable
class _Picture(Protocol):
    """PIL.Image.Image."""

    mode: str
    width: int
    height: int

    def convert(self, mode: str) -> _Picture: ...

    def save(self, fp: BytesIO, format: str) -> None: ...


def encoded_images(values: Sequence[object]) -> tuple[bytes, ...]:
    """Encode the images of a result: objects of PIL, bytes of a file, URIs with base64 data, or objects with `bytes`.

    Raises: TypeError for another form; ValueError for a URI without valid data, or an image of PIL that is too large or
    cannot be saved.
    """
    return tuple(_encoded(value, f"image {number}") for number, value in enumerate(values, start=1))


def _encoded(value: object, where: str) -> bytes:
    if isinstance(value, Mapping):
        value = value.get("bytes", value.get("image", value.get("url")))
    if isinstance(value, bytes):
        return value
    if isinstance(value, str) and value.startswith("data:image/"):
        return decoded(value.partition(",")[2], where)
    if isinstance(value, _Picture):
        return _as_png(value, where)
    raise TypeError(
        f"{where} is of type {type(value).__name__}; return an image of PIL, the bytes of a file, or a data: URI"
    )


def _as_png(picture: _Picture, where: str) -> bytes:
    # Checked first: saving 32 Mi pixels takes many seconds.
    _check_pixels(picture.width, picture.height, where)
    file = BytesIO()
    try:
        (picture if picture.mode in PNG_MODES else picture.convert("RGB")).save(file, "PNG")
    except Exception as error:  # Pillow raises many types, also for a damaged file that it has only opened
        raise ValueError(f"{where} cannot be saved as PNG: {error}") from None
    return file.getvalue()


def decoded(text: str, where: str) -> bytes:
    """Decode base64. Raises: ValueError."""
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"{where} has no valid base64 data: {error}") from None


def check_images(images: Sequence[bytes], source: str = "the tool") -> None:
    """Check size and format of images, and decode them. `source`: for messages.

    Raises: ValueError for an image that is too large, damaged, or of another format.
    """
    for number, image in enumerate(images, start=1):
        _check(image, f"image {number} of {source}")


def _check(image: bytes, where: str) -> None:
    from PIL import Image

    if len(image) > MAX_BYTES:
        raise ValueError(f"{where} has {len(image)} bytes, but may have {MAX_BYTES}")
    try:
        with Image.open(BytesIO(image), formats=TOOL_FORMATS) as opened:
            width, height = opened.size
            if width * height <= MAX_PIXELS:
                opened.load()
    except Exception:  # Pillow's readers raise many types for damaged files
        raise ValueError(f"{where} is damaged, or in another format than {', '.join(TOOL_FORMATS)}") from None
    _check_pixels(width, height, where)


def _check_pixels(width: int, height: int, where: str) -> None:
    if width * height > MAX_PIXELS:
        raise ValueError(f"{where} has {width} x {height} pixels, but may have {MAX_PIXELS}")
