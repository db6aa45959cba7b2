"""Places of images in prompts: from the markers of a row to one placeholder token per feature.

A row marks the place of an image by `<image>` in a text (verl) or by a part `{"type": "image"}`. Both become the text
that the chat template of the model writes for an image, with a single placeholder token, which is repeated after the
text is tokenized:

    <image> is it a cat?
    <|vision_start|><|image_pad|><|vision_end|> is it a cat?
    <|vision_start|><|image_pad|><|image_pad|><|image_pad|><|image_pad|><|vision_end|> is it a cat?
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np

from mcore_rl.errors import DataError

MARKER = "<image>"
_IMAGE_PARTS = ("image", "image_url", "input_image")
_VALUE_NAMES = ("image", "image_url", "bytes", "path", "url")


@dataclass(frozen=True)
class MarkedPrompt:
    """Prompt of a row with the model's text at the place of each image, and the images in the order of the places."""

    prompt: object
    images: list[object]


def marked(prompt: object, column: Sequence[object], text: str, where: str) -> MarkedPrompt:
    """Replace the markers of a prompt, a text or chat messages, by `text`.

    column: images of the row, which belong to the markers in order. A part may contain its image itself.

    Raises: DataError if there are more or fewer markers than images.
    """
    remaining, images, places = iter(column), list[object](), 0

    def take(own: object = None) -> str:
        nonlocal places
        places += 1
        # Counted first and compared at the end, so that the message has both numbers.
        images.extend(islice(remaining, 1) if own is None else [own])
        return text

    replaced = _replaced(prompt, take, has_images=bool(column), where=where)
    given = len(images) + sum(1 for _ in remaining)
    if places != given:
        raise DataError(
            f"{where} has {given} images for {places} places in its prompt; write {MARKER} (or a part of type image) "
            "once for each image"
        )
    return MarkedPrompt(replaced, images)


class _Take(Protocol):
    """Returns the text of the next image, which is `own` or the next one of the column."""

    def __call__(self, own: object = None) -> str: ...


def _replaced(prompt: object, take: _Take, *, has_images: bool, where: str) -> object:
    if isinstance(prompt, str):
        return "".join(_pieces(prompt, take)) if has_images else prompt
    if not isinstance(prompt, list | tuple):
        return prompt
    replaced = []
    for message in prompt:
        if isinstance(message, Mapping) and "content" in message:
            content = message["content"]
            if isinstance(content, list | tuple):
                content = [_part(part, take, has_images=has_images, where=where) for part in content]
            else:
                content = _replaced(content, take, has_images=has_images, where=where)
            message = {**message, "content": content}
        replaced.append(message)
    return replaced


def _pieces(text: str, take: _Take) -> Iterator[str]:
    first, *others = text.split(MARKER)
    yield first
    for other in others:
        yield take()
        yield other


def _part(part: object, take: _Take, *, has_images: bool, where: str) -> object:
    if not isinstance(part, Mapping):
        return _replaced(part, take, has_images=has_images, where=where)
    kind = part.get("type")
    if kind in ("video", "video_url", "audio", "input_audio"):
        raise DataError(f"{where} has a part of type {kind!r}, but prompts have text and images only; remove such rows")
    if kind in _IMAGE_PARTS:
        own = next((part[name] for name in _VALUE_NAMES if part.get(name) is not None), None)
        return {"type": "text", "text": take(own)}
    if isinstance(part.get("text"), str):
        return {**part, "text": _replaced(part["text"], take, has_images=has_images, where=where)}
    return part


def expanded(token_ids: np.ndarray, image_token: int, counts: Sequence[int], where: str) -> np.ndarray:
    """Repeat the placeholder token of image i `counts[i]` times. Shapes: int32 [P] -> int32 [P + sum(counts) - images].

    Raises: DataError if the number of placeholder tokens differs: a text of the row contains the token itself.
    """
    places = token_ids == image_token
    if int(places.sum()) != len(counts):
        raise DataError(
            f"{where} has {int(places.sum())} placeholder tokens for {len(counts)} images; remove the model's special "
            "tokens from its texts"
        )
    repeats = np.ones(len(token_ids), np.int64)
    repeats[places] = counts
    return np.repeat(token_ids, repeats)


def image_starts(token_ids: np.ndarray, image_token: int, counts: Sequence[int]) -> np.ndarray | None:
    """Return the index of each image's first placeholder token in an expanded prompt, int32 [images]; None if the
    number of placeholder tokens is not sum(counts)."""
    places = np.flatnonzero(token_ids == image_token)
    firsts = np.cumsum([0, *counts])
    if len(places) != firsts[-1]:
        return None
    return places[firsts[:-1]].astype(np.int32)
