"""Encoding of a message as the words that differ from the receiver's copy of an earlier message.

Both ends know the pieces of a message from the plan. Layout of a frame, in little-endian order:

    header    MAGIC, versions of base and content, bytes of the content, SHA-256 of the content
    counts    int32 per piece: number of changed words, or WHOLE
    pieces    WHOLE: all bytes of the piece
              else: gaps (uint8), then longer gaps (uint16, uint32), then the changed words

A gap is the number of unchanged words before a changed one. A gap of at least 255 is written as 255, and its value
follows in the uint16 array; from 65535 on, 65535 is written there, and the value follows in the uint32 array.

A piece is whole if more than a third of its words changed, so a frame exceeds its content by at most the header and the
counts.

Words are overwritten with their new bytes, whatever they mean: NaN payloads and signs of zero arrive as they are.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.slices.messages import Message, aligned, views

ByteArray = npt.NDArray[np.uint8]
Words = npt.NDArray[np.unsignedinteger]

_Integer = TypeVar("_Integer", bound=np.integer)

MAGIC = b"MCRLDLT1"
NO_BASE = 0
"""Base version of a frame that contains all bytes. Versions of contents are positive."""
WHOLE = -1
PIECE_BYTES = 1 << 20
"""Maximum bytes of a piece: its arrays stay in the processor's cache."""
MAX_CHANGED = 3
"""A piece is sent whole if more than 1 / MAX_CHANGED of its words changed."""
_HEADER = struct.Struct("<8sQQQ32s")
_WORDS: dict[int, type[np.unsignedinteger]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_COUNT_BYTES = np.dtype(np.int32).itemsize


class Piece(NamedTuple):
    """Bytes [start, end) of a message, which consist of words of `word_bytes`."""

    start: int
    end: int
    word_bytes: int

    def words(self, content: ByteArray) -> Words:
        """Return a view of the piece's words in a message's bytes."""
        return content[self.start : self.end].view(_WORDS[self.word_bytes])


@dataclass(frozen=True)
class FrameHeader:
    """Versions and size of a frame's content. `base`: version that the receiver must hold; NO_BASE: none."""

    base: int
    version: int
    num_bytes: int
    digest: bytes

    @classmethod
    def of(cls, frame: ByteArray) -> FrameHeader:
        """Read the header of a frame.

        Raises: WeightSyncError if these bytes are not a frame.
        """
        if len(frame) < _HEADER.size:
            raise WeightSyncError(f"{len(frame)} bytes are too few for a delta message")
        magic, *values = _HEADER.unpack_from(frame.data)
        if magic != MAGIC:
            raise WeightSyncError(f"a delta message begins with {magic!r} instead of {MAGIC!r}")
        return cls(*values)

    def pack(self) -> bytes:
        return _HEADER.pack(MAGIC, self.base, self.version, self.num_bytes, self.digest)


def tensors_of(message: Message) -> list[Piece]:
    """Return the bytes of every tensor in a message. Between them are bytes of the alignment."""
    layout = torch.empty(message.num_bytes, dtype=torch.uint8, device="meta")
    boxes = (box for _, boxes_of_slice in views(message, layout) for box in boxes_of_slice)
    starts = ((each.storage_offset() * each.itemsize, each) for each in boxes)
    return [Piece(start, start + each.nbytes, each.itemsize) for start, each in starts]


def pieces_of(message: Message) -> tuple[Piece, ...]:
    """Divide a message into pieces: neighbouring tensors with words of the same size form pieces together."""
    runs: list[Piece] = []
    for each in tensors_of(message):
        end = aligned(each.end)
        if runs and runs[-1].word_bytes == each.word_bytes:
            runs[-1] = runs[-1]._replace(end=end)
        else:
            runs.append(each._replace(end=end))
    return tuple(
        Piece(start, min(start + PIECE_BYTES, run.end), run.word_bytes)
        for run in runs
        for start in range(run.start, run.end, PIECE_BYTES)
    )


def max_frame_bytes(pieces: Sequence[Piece]) -> int:
    """Return the maximum bytes of a frame of these pieces."""
    return _HEADER.size + len(pieces) * _COUNT_BYTES + pieces[-1].end


def encode(content: ByteArray, base: ByteArray | None, pieces: Sequence[Piece], versions: tuple[int, int]) -> ByteArray:
    """Encode a message's bytes.

    base: bytes of the same message that the receiver holds, of version versions[0]; None: all bytes are encoded.
    versions: versions of base (NO_BASE without one) and content.
    """
    counts, parts = [], []
    for piece in pieces:
        count, arrays = _encode_piece(piece.words(content), None if base is None else piece.words(base))
        counts.append(count)
        parts += [array.view(np.uint8) for array in arrays]
    header = FrameHeader(*versions, len(content), hashlib.sha256(content.data).digest()).pack()
    table = np.array(counts, np.int32).view(np.uint8)
    return np.concatenate([np.frombuffer(header, np.uint8), table, *parts])


def _encode_piece(words: Words, base: Words | None) -> tuple[int, list[Words]]:
    """Return the piece's entry in the counts, and its arrays."""
    if base is None:
        return WHOLE, [words]
    changed = np.flatnonzero(words != base)
    if MAX_CHANGED * len(changed) > len(words):
        return WHOLE, [words]
    gaps = np.diff(changed, prepend=-1) - 1
    escaped = gaps[gaps >= 0xFF]
    longest = escaped[escaped >= 0xFFFF]
    arrays = [
        np.minimum(gaps, 0xFF).astype(np.uint8),
        np.minimum(escaped, 0xFFFF).astype(np.uint16),
        longest.astype(np.uint32),
        words[changed],
    ]
    return len(changed), arrays


def decode(frame: ByteArray, held: ByteArray, pieces: Sequence[Piece], version: int) -> int:
    """Apply a frame to the receiver's bytes in place. Returns their new version.

    held: the receiver's bytes, of version `version`. After an error they are undefined.
    frame: may be followed by other bytes.
    Raises: WeightSyncError for another base, a damaged frame, or bytes that differ from the sender's afterwards.
    """
    header = FrameHeader.of(frame)
    if header.num_bytes != len(held):
        raise WeightSyncError(f"a delta message is for {header.num_bytes} bytes instead of {len(held)}")
    if header.base not in (NO_BASE, version):
        raise WeightSyncError(f"a delta message is based on version {header.base}, but version {version} is held")
    reader = _Reader(frame, _HEADER.size)
    for piece, count in zip(pieces, reader.take(np.int32, len(pieces)).tolist(), strict=True):
        _decode_piece(reader, piece.words(held), count, complete=header.base == NO_BASE)
    if hashlib.sha256(held.data).digest() != header.digest:
        raise WeightSyncError(f"after a delta message the bytes of version {header.version} differ from the sender's")
    return header.version


def _decode_piece(reader: _Reader, words: Words, count: int, *, complete: bool) -> None:
    if count == WHOLE:
        words[:] = reader.take(words.dtype.type, len(words))
        return
    if complete or not 0 <= count <= len(words):
        raise WeightSyncError(f"a delta message changes {count} words of a piece of {len(words)}")
    gaps = reader.take(np.uint8, count).astype(np.int64)
    for escape, kind in ((0xFF, np.uint16), (0xFFFF, np.uint32)):
        at = np.flatnonzero(gaps == escape)
        gaps[at] = reader.take(kind, len(at))
    places = np.cumsum(gaps + 1) - 1
    if count and places[-1] >= len(words):
        raise WeightSyncError(f"a delta message changes word {places[-1]} of a piece of {len(words)}")
    words[places] = reader.take(words.dtype.type, count)


@dataclass
class _Reader:
    """Reads arrays from a frame, from byte `position` on."""

    frame: ByteArray
    position: int

    def take(self, kind: type[_Integer], count: int) -> npt.NDArray[_Integer]:
        """Return the next `count` elements, a view of the frame.

        Raises: WeightSyncError at the end of the frame.
        """
        end = self.position + count * np.dtype(kind).itemsize
        if end > len(self.frame):
            raise WeightSyncError(f"a delta message ends after {len(self.frame)} bytes")
        found = self.frame[self.position : end].view(kind)
        self.position = end
        return found
