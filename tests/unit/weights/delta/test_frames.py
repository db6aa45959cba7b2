"""Frames of messages: the receiver's bytes are equal to the sender's after every edit, and damage is detected."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.delta.frames import (
    NO_BASE,
    PIECE_BYTES,
    FrameHeader,
    Piece,
    decode,
    encode,
    max_frame_bytes,
    pieces_of,
)
from mcore_rl.weights.slices.messages import Message, Slice

NUM_WORDS = 3 * PIECE_BYTES // 2 + 96
"""Words of a message of 2-byte words with four pieces."""
SPECIAL = {
    "quiet NaN with a payload": 0x7FC1,
    "signalling NaN": 0x7F81,
    "negative NaN": 0xFFFF,
    "negative zero": 0x8000,
    "zero": 0x0000,
    "denormal": 0x0001,
    "negative denormal": 0x807F,
    "infinity": 0x7F80,
}
"""bfloat16 values by their bits."""


def pieces_of_words(num_words: int, word_bytes: int = 2) -> tuple[Piece, ...]:
    end = num_words * word_bytes
    return tuple(Piece(at, min(at + PIECE_BYTES, end), word_bytes) for at in range(0, end, PIECE_BYTES))


def random_words(num_words: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 16, num_words, dtype=np.uint16)


def sent(old: np.ndarray, new: np.ndarray, pieces: tuple[Piece, ...]) -> np.ndarray:
    """Send `old` whole, then `new` as a delta. Returns the last frame; the receiver must hold the bytes of `new`."""
    old, new = old.view(np.uint8), new.view(np.uint8)
    held = np.full(len(old), 0xA5, np.uint8)
    first = encode(old, None, pieces, (NO_BASE, 1))
    assert decode(first, held, pieces, 0) == 1
    assert np.array_equal(held, old)
    frame = encode(new, old, pieces, (1, 2))
    assert decode(frame, held, pieces, 1) == 2
    assert np.array_equal(held, new)
    assert max(len(first), len(frame)) <= max_frame_bytes(pieces)
    return frame


def edited(old: np.ndarray, places: list[int]) -> np.ndarray:
    new = old.copy()
    new[places] ^= 0x0101
    return new


@pytest.mark.parametrize(
    ("places", "content_bytes"),
    [
        ([], 0),
        ([0], 3),
        ([NUM_WORDS - 1], 3),  # in a short piece
        ([0, 255], 3 + 3),  # a gap of 254
        ([0, 256], 3 + 5),
        ([0, 257], 3 + 5),
        ([0, 65_535], 3 + 5),  # a gap of 65,534
        ([0, 65_536], 3 + 9),
        ([0, 400_000], 3 + 9),
        ([300_000, 524_288, 524_289], 9 + 3 + 3),  # the last two in the next piece
        ([5, 6, 400, 70_000, 400_000, 1_000_000], 3 + 3 + 5 + 9 + 9 + 9),
    ],
)
def test_frame_few_edits_arrive_with_the_least_bytes(places: list[int], content_bytes: int) -> None:
    old, pieces = random_words(NUM_WORDS), pieces_of_words(NUM_WORDS)
    frame = sent(old, edited(old, places), pieces)
    assert len(frame) == 64 + 4 * len(pieces) + content_bytes


@pytest.mark.parametrize("word_bytes", [1, 2, 4])
@pytest.mark.parametrize("share", [0.0001, 0.01, 0.3, 0.36, 0.9, 1.0])
def test_frame_random_edits_arrive_exactly(share: float, word_bytes: int) -> None:
    random = np.random.default_rng(int(share * 1000))
    kind = np.dtype(f"u{word_bytes}")
    num_words = 2 * PIECE_BYTES // word_bytes
    pieces = pieces_of_words(num_words, word_bytes)
    old = np.frombuffer(random.bytes(num_words * word_bytes), kind)
    new = np.where(random.random(num_words) < share, old ^ random.integers(1, 256, num_words).astype(kind), old)
    frame = sent(old, new, pieces)
    if share > 1 / 3:
        assert len(frame) == max_frame_bytes(pieces)
    else:
        assert len(frame) < max_frame_bytes(pieces) * (0.72 if word_bytes == 1 else 0.51)


@pytest.mark.parametrize("before", SPECIAL)
def test_frame_special_values_arrive_bit_for_bit(before: str) -> None:
    """Values that are equal as numbers but not as bits, and values that are not equal to themselves."""
    old = random_words(4096)
    old[100:108] = SPECIAL[before]
    new = old.copy()
    new[100:108] = list(SPECIAL.values())
    frame = sent(old, new, pieces_of_words(4096))
    changed = len(SPECIAL) - 1
    assert len(frame) == 64 + 4 + changed * 3


def test_pieces_neighbours_with_equal_words_are_joined() -> None:
    dtypes = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32, torch.float8_e4m3fn]
    slices: list[Slice] = []
    for number, dtype in enumerate(dtypes):
        offset = slices[-1].end if slices else 0
        slices.append(Slice(f"w{number}", (700, 1001), dtype, 0, 0, 700, f"w{number}", 0, offset))
    message = Message(0, 0, 0, tuple(slices))
    pieces = pieces_of(message)
    ends = [each.end for each in slices]
    assert [piece.start for piece in pieces] == [0, *(piece.end for piece in pieces[:-1])]
    assert pieces[-1].end == message.num_bytes
    assert all(piece.end - piece.start <= PIECE_BYTES for piece in pieces)
    by_size = {size: {end for _, end, word in pieces if word == size} for size in (1, 2, 4)}
    assert ends[1] in by_size[2]
    assert ends[0] not in by_size[2]
    assert {ends[2], ends[4]} <= by_size[1]
    assert ends[3] in by_size[4]
    new = np.random.default_rng(3).integers(0, 256, message.num_bytes, dtype=np.uint8)
    old = new.copy()
    old[::1001] ^= 3
    sent(old, new, pieces)


def frame_of(edits: int) -> tuple[np.ndarray, np.ndarray, tuple[Piece, ...]]:
    """Return the receiver's bytes, a frame based on them, and the pieces."""
    old, pieces = random_words(50_000), pieces_of_words(50_000)
    return (
        old.view(np.uint8),
        encode(edited(old, list(range(7, 50_000, 50_000 // edits))).view(np.uint8), old.view(np.uint8), pieces, (4, 5)),
        pieces,
    )


def test_decode_every_damaged_byte_is_detected() -> None:
    held, frame, pieces = frame_of(edits=40)
    for at in range(len(frame)):
        if 16 <= at < 24:
            continue  # the new version, which is the caller's
        damaged = frame.copy()
        damaged[at] ^= 0x10
        with pytest.raises(WeightSyncError):
            decode(damaged, held.copy(), pieces, 4)


def test_decode_truncated_frame_is_detected() -> None:
    held, frame, pieces = frame_of(edits=40)
    for size in range(len(frame)):
        with pytest.raises(WeightSyncError):
            decode(frame[:size], held.copy(), pieces, 4)


def test_decode_other_base_is_refused_before_any_change() -> None:
    held, frame, pieces = frame_of(edits=3)
    before = held.copy()
    with pytest.raises(WeightSyncError, match="is based on version 4, but version 3 is held"):
        decode(frame, held, pieces, 3)
    assert np.array_equal(held, before)


def test_decode_skipped_update_is_detected_by_the_digest() -> None:
    held, frame, pieces = frame_of(edits=3)
    held[99] ^= 1
    with pytest.raises(WeightSyncError, match="the bytes of version 5 differ from the sender's"):
        decode(frame, held, pieces, 4)


def test_decode_delta_without_base_is_refused() -> None:
    held, frame, pieces = frame_of(edits=3)
    forged = frame.copy()
    forged[8:16] = np.frombuffer(struct.pack("<Q", NO_BASE), np.uint8)
    with pytest.raises(WeightSyncError, match="changes 3 words"):
        decode(forged, held, pieces, 0)


def test_header_is_read_without_the_content() -> None:
    held, frame, _ = frame_of(edits=3)
    header = FrameHeader.of(frame[:64])
    assert (header.base, header.version, header.num_bytes) == (4, 5, len(held))


def test_frame_followed_by_other_bytes_is_decoded() -> None:
    held, frame, pieces = frame_of(edits=3)
    expected = held.copy()
    assert decode(frame, expected, pieces, 4) == 5
    assert decode(np.concatenate([frame, random_words(100).view(np.uint8)]), held, pieces, 4) == 5
    assert np.array_equal(held, expected)
