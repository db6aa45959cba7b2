"""Images in the sequences of one episode, from the row's prompt, answers of tools, and messages of a program.

The chat template writes one placeholder token for an image of an answer, which is repeated here, once per feature. The
tokens up to the one after the last placeholder of an image identify its place: every sequence that begins with them
contains it. Without that token, the place of a small image would be the beginning of a larger image's place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mcore_rl.data.chat.messages import message_images
from mcore_rl.errors import DataError
from mcore_rl.rollout.tools.images import check_images
from mcore_rl.rollout.tools.interface import ToolResult
from mcore_rl.types import NO_IMAGES, ImageSource, ProcessedImage, PromptImages
from mcore_rl.types.chat import ChatMessage
from mcore_rl.vision.placeholders import expanded, image_starts

TEXT_MODEL = "the model reads text only; use a model with a vision tower, or a tool that answers with text"


class ImageReader(Protocol):
    """Part of vision.processor.ImageProcessor that episodes use."""

    @property
    def image_token(self) -> int: ...

    def process_images(self, sources: Sequence[ImageSource], where: str) -> tuple[ProcessedImage, ...]: ...

    def num_placeholders(self, image: ProcessedImage) -> int: ...


class KnownTokens(Protocol):
    """Tokens of a sequence of the episode."""

    def num_common(self, token_ids: np.ndarray) -> int:
        """Return the number of leading tokens that `token_ids` have in common with these."""


@dataclass(frozen=True)
class ToolImages:
    """Support for images in answers of tools, equal for all episodes of a run.

    fault: reason why answers cannot contain images; None: they can, and `reader` processes them.
    """

    reader: ImageReader | None = None
    fault: str | None = TEXT_MODEL


@dataclass(frozen=True)
class _PlacedImage:
    """Image of an answer. tokens: all tokens up to the one after its last placeholder; start: index of the first
    placeholder."""

    image: ProcessedImage
    tokens: np.ndarray
    start: int


class EpisodeImages:
    """Images of one episode. row_ids, row_images: prompt of the row and its images."""

    def __init__(self, tools: ToolImages, row_ids: np.ndarray, row_images: PromptImages | None) -> None:
        self._tools, self._row_ids, self._row_images = tools, row_ids, row_images
        self._processed: dict[bytes, ProcessedImage] = {}
        """Processed images, by their encoded bytes."""
        self._placed: list[_PlacedImage] = []

    async def read(self, tool: str, answer: ToolResult) -> ToolResult:
        """Process the images of an answer, each of them once. Returns the answer, or an error if the image processor
        rejects an image, for example because it is too narrow.

        Raises: DataError if answers cannot contain images.
        """
        if self._tools.fault is not None or self._tools.reader is None:
            raise DataError(f"tool {tool} answered with images, but {self._tools.fault}")
        try:
            await self._process(self._tools.reader, answer.images, f"tool {tool}")
        except DataError as error:
            return answer.rejected(str(error))
        return answer

    async def read_messages(self, messages: Sequence[ChatMessage]) -> None:
        """Check and process the images of messages that a program sends.

        Raises: DataError if the model or its chat template cannot read images, or for an image that is too large,
        damaged, or rejected by the image processor.
        """
        sources = [source for message in messages for source in message_images(message)]
        if not sources:
            return
        if self._tools.fault is not None or self._tools.reader is None:
            raise DataError(f"the messages have images, but {self._tools.fault}")
        try:
            await asyncio.to_thread(check_images, [each for each in sources if each not in self._processed], "messages")
        except ValueError as error:
            raise DataError(str(error)) from None
        await self._process(self._tools.reader, sources, "the messages")

    async def _process(self, reader: ImageReader, sources: Sequence[bytes], where: str) -> None:
        new = [source for source in dict.fromkeys(sources) if source not in self._processed]
        if new:
            # In a thread: resizing a large image takes longer than an engine's step.
            images = await asyncio.to_thread(reader.process_images, new, where)
            self._processed |= dict(zip(new, images, strict=True))

    def place(
        self, before: np.ndarray, ids: list[int], messages: Sequence[ChatMessage], *, keep: bool = True
    ) -> list[int]:
        """Return `ids`, the rendered tokens of `messages`, with the placeholders of their images repeated.

        before: tokens of the sequence that `ids` continue, int32 [S]. keep: note the places of the images, so that
        `inside` finds them.

        Raises: DataError if the template wrote more or fewer placeholders than images, or for an image that was not
        read before.
        """
        sources = [source for message in messages for source in message_images(message)]
        if not sources:
            return ids
        reader, images = self._tools.reader, [self._processed.get(source) for source in sources]
        if reader is None or None in images:
            raise DataError("a message has an image that session.call did not return; images are answers of tools only")
        found = [image for image in images if image is not None]
        counts = [reader.num_placeholders(image) for image in found]
        tokens = expanded(np.array(ids, np.int32), reader.image_token, counts, "a message with images")
        starts = image_starts(tokens, reader.image_token, counts)
        assert starts is not None, "expanded has compared the numbers"
        if not keep:
            return tokens.tolist()
        whole = np.concatenate([before, tokens])
        for image, start, count in zip(found, (starts + len(before)).tolist(), counts, strict=True):
            self._add(_PlacedImage(image, whole[: start + count + 1], start))
        return tokens.tolist()

    def inside(self, ids: np.ndarray, known: Iterable[KnownTokens]) -> PromptImages | None:
        """Return the images of a sequence; None if it has none.

        known: token sequences of the episode, in which placeholders without image are tokens that the policy sampled.

        Raises: DataError if the row has images and the tokens do not begin with its prompt, or for placeholders of an
        answer at another place than where it was rendered.
        """
        if self._row_images is not None and not np.array_equal(ids[: len(self._row_ids)], self._row_ids):
            raise DataError(
                "the row has images, but session.generate was called with tokens that do not begin with its prompt; "
                "extend session.prompt_ids"
            )
        if self._tools.reader is None:
            return self._row_images
        is_placeholder = ids == self._tools.reader.image_token
        if not is_placeholder.any():
            return self._row_images
        known_tokens = max(_common(ids, self._row_ids), *(each.num_common(ids) for each in known), 0)
        explained = np.arange(len(ids)) < known_tokens
        placed = []
        for each in self._placed:
            shared = _common(ids, each.tokens)
            if shared == len(each.tokens):
                placed.append(each)
            elif shared > each.start:
                explained[each.start : shared] = False
        # Afterwards, because an image of another size may begin at the same place.
        for each in placed:
            explained[each.start : len(each.tokens)] = True
        if (is_placeholder & ~explained).any():
            raise DataError(
                "session.generate was called with placeholders of an image at another place than where its answer was "
                "rendered; append the tokens of session.render, or pass those of session.next_prompt, unchanged"
            )
        if not placed:
            return self._row_images
        placed.sort(key=lambda each: each.start)
        begun = self._row_images or NO_IMAGES
        return begun.followed_by([each.image for each in placed], [each.start for each in placed])

    def _add(self, new: _PlacedImage) -> None:
        for each in self._placed:
            if each.start == new.start and np.array_equal(each.tokens, new.tokens):
                if each.image.digest != new.image.digest:
                    # Sequences are told apart by their tokens, which are equal here.
                    raise DataError("two messages after the same tokens differ in an image only")
                return
        self._placed.append(new)


def image_digests(images: PromptImages | None) -> bytes:
    """Return the checksums of images, to tell apart sequences with equal tokens."""
    return b"" if images is None else images.digest.encode()


def _common(first: np.ndarray, second: np.ndarray) -> int:
    """Return the number of leading tokens that two sequences have in common."""
    length = min(len(first), len(second))
    differing = np.flatnonzero(first[:length] != second[:length])
    return int(differing[0]) if len(differing) else length
