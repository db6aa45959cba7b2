"""Small copies of images for records of responses, as URIs that a browser shows."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Sequence
from io import BytesIO

from mcore_rl.types.chat import ChatMessage, ContentPart
from mcore_rl.types.vision import ImageSource
from mcore_rl.vision.sources import TOOL_FORMATS, read_image

MAX_EDGE = 128
"""Longest edge in pixels; such a file has a few kilobytes."""
MAX_IMAGES = 4
"""Number of images of a prompt, and of the answers of tools in a conversation, that records contain."""
_QUALITY = 80


def thumbnails(sources: Sequence[ImageSource]) -> list[str]:
    """Return the first images of a prompt as JPEG files of at most MAX_EDGE x MAX_EDGE pixels.

    Raises: DataError for an image that cannot be read.
    """
    return [_thumbnail(source) for source in sources[:MAX_IMAGES]]


def with_thumbnails(messages: Sequence[ChatMessage]) -> list[dict[str, object]]:
    """Return messages whose first MAX_IMAGES images are thumbnails; parts of further images have no `image`."""
    numbers = itertools.count()

    def shown(part: ContentPart) -> dict[str, object]:
        if "image" not in part:
            return {**part}
        return (
            {"type": "image", "image": _thumbnail(part["image"], TOOL_FORMATS)}
            if next(numbers) < MAX_IMAGES
            else {"type": "image"}
        )

    contents = [message["content"] for message in messages]
    return [
        {**message, "content": content if isinstance(content, str) else [shown(part) for part in content]}
        for message, content in zip(messages, contents, strict=True)
    ]


def _thumbnail(source: ImageSource, formats: tuple[str, ...] | None = None) -> str:
    image = read_image(source, "image of a record", formats)
    image.thumbnail((MAX_EDGE, MAX_EDGE))
    file = BytesIO()
    image.save(file, "jpeg", quality=_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
