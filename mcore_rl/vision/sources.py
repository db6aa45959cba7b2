"""Images as the rows of a file hold them: paths, bytes, and objects with either.

An image is decoded when its prompt is sampled; until then only its header is read, for its size. Paths must be readable
on every host with an engine.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_rl.errors import DataError
from mcore_rl.types.vision import ImageSource

if TYPE_CHECKING:
    from PIL.Image import Image

TOOL_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats of Pillow for images of tools, which may follow a model's wishes: their readers start no other program."""
_SHOWN = 80


def image_sources(value: object, where: str, directory: Path) -> list[ImageSource]:
    """Return the images of a column: one value or a list. `where` starts error messages.

    Each value is a path, relative to the `directory` of the file; a URI with base64 data; bytes; or an object with one
    of these under `bytes`, `path` or `image`, as verl and `datasets` write.

    Raises: DataError for any other value, also for the address of a server.
    """
    values = value if isinstance(value, list | tuple) else [value]
    return [_source(each, f"{where}: image {number}", directory) for number, each in enumerate(values, start=1)]


def _source(value: object, where: str, directory: Path) -> ImageSource:
    if isinstance(value, Mapping):
        found = [value[name] for name in ("bytes", "image", "path", "url") if value.get(name) is not None]
        if not found:
            raise DataError(f"{where} is an object without `bytes` or `path`; write one of them")
        return _source(found[0], where, directory)
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value:
        raise DataError(f"{where} is of type {type(value).__name__}, not a path or bytes")
    if value.startswith("data:"):
        try:
            return base64.b64decode(value.partition(",")[2], validate=True)
        except binascii.Error as error:
            raise DataError(f"{where} is a URI without valid base64 data: {error}") from None
    value = value.removeprefix("file://")
    if "://" in value:
        raise DataError(f"{where} is the address {value[:_SHOWN]}; download the image and write its path")
    return str(directory / value)


def image_size(source: ImageSource, where: str) -> tuple[int, int]:
    """Return height and width in pixels, from the header only.

    Raises: DataError for a source that is missing or no image.
    """
    image = _opened(source, where)
    height, width = image.height, image.width
    image.close()
    return height, width


def read_image(source: ImageSource, where: str, formats: tuple[str, ...] | None = None) -> Image:
    """Decode an image to RGB. formats: formats of Pillow that are tried; None: all.

    Raises: DataError for a source that is missing or damaged.
    """
    try:
        with _opened(source, where, formats) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{where}: {_named(source)} is damaged: {error}") from None


def _opened(source: ImageSource, where: str, formats: tuple[str, ...] | None = None) -> Image:
    from PIL import Image

    try:
        return Image.open(source if isinstance(source, str) else BytesIO(source), formats=formats)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is not a readable image"
        raise DataError(f"{where}: {_named(source)} cannot be read: {reason}; correct the row or remove it") from None


def _named(source: ImageSource) -> str:
    return source if isinstance(source, str) else f"an image of {len(source)} bytes"
