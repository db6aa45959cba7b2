"""Copies of messages in host memory, on which the next update's frames are based.

The sender keeps the bytes that it sent last, the receiver those that it holds; both are as large as the message. They
belong to one connection: after a new one, every first frame contains all bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.delta.frames import (
    NO_BASE,
    ByteArray,
    Piece,
    decode,
    encode,
    max_frame_bytes,
    pieces_of,
    tensors_of,
)
from mcore_rl.weights.slices.messages import Message, aligned

Key = tuple[int, int, int]
"""Bucket, receiver and sender of a message: the same in every update."""


def _key(message: Message) -> Key:
    return message.bucket, message.receiver, message.sender


@dataclass
class FrameBytes:
    """Bytes of an update's frames, and of the messages that they stand for."""

    sent: int = 0
    content: int = 0

    def __add__(self, other: FrameBytes) -> FrameBytes:
        return FrameBytes(self.sent + other.sent, self.content + other.content)


@dataclass
class _SentCopy:
    """Bytes that were sent last, of version `version`."""

    pieces: tuple[Piece, ...]
    padding: list[slice]
    """Alignment after tensors. It is overwritten with zeros, since slots contain bytes of other messages there."""
    content: ByteArray | None = None
    version: int = NO_BASE


class SentCopies:
    """Copies of a sender's messages."""

    def __init__(self) -> None:
        self._copies: dict[Key, _SentCopy] = {}
        self.bytes = FrameBytes()
        """Bytes since the last `reset`."""

    def reset(self, num_frozen: int = 0) -> None:
        """Count the bytes of a new update. `num_frozen`: the update lacks this many buckets, whose copies are no longer
        needed."""
        self.bytes = FrameBytes()
        self._copies = {key: copy for key, copy in self._copies.items() if key[0] >= num_frozen}

    def frame(self, message: Message, memory: torch.Tensor) -> torch.Tensor:
        """Encode a message, and remember its bytes. Returns the frame, which does not share memory with others.

        memory: uint8 [message.num_bytes], in host memory.
        """
        copy, content = self._copy_of(message), memory.numpy()
        for padding in copy.padding:
            content[padding] = 0
        frame = encode(content, copy.content, copy.pieces, (copy.version, copy.version + 1))
        if copy.content is None:
            copy.content = content.copy()
        else:
            np.copyto(copy.content, content)
        copy.version += 1
        self.bytes += FrameBytes(len(frame), len(content))
        return torch.from_numpy(frame)

    def _copy_of(self, message: Message) -> _SentCopy:
        if _key(message) not in self._copies:
            ends = (each.end for each in tensors_of(message))
            padding = [slice(end, aligned(end)) for end in ends if end < aligned(end)]
            self._copies[_key(message)] = _SentCopy(pieces_of(message), padding)
        return self._copies[_key(message)]


@dataclass
class _HeldCopy:
    """Bytes that this process holds, of version `version`. Shapes: uint8 [message.num_bytes]."""

    pieces: tuple[Piece, ...]
    memory: torch.Tensor
    version: int = NO_BASE


@dataclass
class HeldCopies:
    """Copies of a receiver's messages. `name`: name of a sender, for errors."""

    name: Callable[[int], str]
    _copies: dict[Key, _HeldCopy] = field(default_factory=dict, init=False)

    def frame_memory(self, message: Message) -> torch.Tensor:
        """Return memory for any frame of a message. Shapes: uint8 [maximum size of a frame]."""
        return torch.empty(max_frame_bytes(self._copy_of(message).pieces), dtype=torch.uint8)

    def apply(self, message: Message, frame: torch.Tensor) -> torch.Tensor:
        """Decode a frame. Returns the message's bytes, which the caller may not change: the same memory in every
        update.

        Raises: WeightSyncError as `decode`.
        """
        copy = self._copy_of(message)
        try:
            copy.version = decode(frame.numpy(), copy.memory.numpy(), copy.pieces, copy.version)
        except WeightSyncError as error:
            raise WeightSyncError(f"{self.name(message.sender)}, bucket {message.bucket}: {error}") from None
        return copy.memory

    def forget_frozen(self, num_frozen: int) -> None:
        """Free the copies of the first `num_frozen` buckets, which the next update lacks. The sender frees its own, so
        a later update that has them again sends them whole."""
        self._copies = {key: copy for key, copy in self._copies.items() if key[0] >= num_frozen}

    def _copy_of(self, message: Message) -> _HeldCopy:
        if _key(message) not in self._copies:
            memory = torch.zeros(message.num_bytes, dtype=torch.uint8)
            self._copies[_key(message)] = _HeldCopy(pieces_of(message), memory)
        return self._copies[_key(message)]
