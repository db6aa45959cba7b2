"""One rank's part of a sync: its messages, bucket by bucket, and where each slice lies in them.

Sender and receiver compute the same messages without a word to each other. A message holds all that one trainer rank
sends one engine rank of a bucket: slices one behind the other, each packed row by row.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from mcore_rl.weights.slices.needs import Needs, Ranks
from mcore_rl.weights.slices.routes import Places, Route, Router
from model_converters.mapping.placement import Placement
from model_converters.mapping.transforms import Shape

ALIGNMENT_BYTES = 64
"""Of every slice: a cache line, and a multiple of every element size."""


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class Slice:
    """Indices `start : start + length` along `dim` of the HF tensor `hf_name`, whole along the others; the sender's
    tensor `mcore_name` has them from `local_start`. `offset` counts bytes in the message."""

    hf_name: str
    hf_shape: Shape
    dtype: torch.dtype
    dim: int
    start: int
    length: int
    mcore_name: str
    local_start: int
    offset: int

    @property
    def shape(self) -> Shape:
        if not self.hf_shape:
            return ()
        return (*self.hf_shape[: self.dim], self.length, *self.hf_shape[self.dim + 1 :])

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """Offset of what comes behind it."""
        return self.offset + aligned(self.num_bytes)


@dataclass(frozen=True, slots=True)
class Message:
    """From a trainer rank to an engine rank (counted through all engines), in bucket `bucket`."""

    bucket: int
    receiver: int
    sender: int
    slices: tuple[Slice, ...]

    @property
    def num_bytes(self) -> int:
        """With what aligns the slices."""
        return self.slices[-1].end


def views(message: Message, memory: torch.Tensor) -> list[tuple[Slice, torch.Tensor]]:
    """Every slice with its place in the message's bytes."""
    return [
        (each, memory[each.offset : each.offset + each.num_bytes].view(each.dtype).view(each.shape))
        for each in message.slices
    ]


_Slices = dict[tuple[int, int, int], list[Slice]]
"""By bucket, receiver and sender."""


def received_by(
    receivers: Collection[int], placement: Placement, needs: Needs, places: Places, bucket_bytes: int
) -> list[Message]:
    """Everything that these engine ranks get, in the order of the buckets; of one bucket by receiver, then sender.

    Raises: LayoutError.
    """
    wanted, router = np.array(sorted(receivers)), Router(placement, needs, places)
    slices: _Slices = {}
    for bucket, chunk in needs.chunks(bucket_bytes):
        for route in router.routes(chunk):
            _append(slices, bucket, route, np.flatnonzero(np.isin(route.receivers, wanted)))
    return _messages(slices)


def sent_by(trainer_rank: int, placement: Placement, needs: Needs, places: Places, bucket_bytes: int) -> list[Message]:
    """Everything that a trainer rank sends, in the order of the buckets; of one bucket by receiver.

    Raises: LayoutError.
    """
    router = Router(placement, needs, places)
    slices: _Slices = {}
    for bucket, chunk in needs.chunks(bucket_bytes):
        for route in router.routes(chunk):
            if trainer_rank in route.holding.ranks:
                _append(slices, bucket, route, np.flatnonzero(route.senders == trainer_rank))
    return _messages(slices)


def _append(slices: _Slices, bucket: int, route: Route, receivers: Ranks) -> None:
    bound = route.chunk.bound
    for at in receivers.tolist():
        message = slices.setdefault((bucket, int(route.receivers[at]), int(route.senders[at])), [])
        for part, start, length, local_start in route.shares(int(route.shards[at])):
            shape = bound.row.shapes[part]
            message.append(
                Slice(
                    bound.hf[part],
                    shape,
                    bound.dtype,
                    bound.row.dim,
                    start,
                    length,
                    bound.mcore,
                    local_start,
                    offset=message[-1].end if message else 0,
                )
            )


def _messages(slices: _Slices) -> list[Message]:
    return [Message(*key, tuple(slices[key])) for key in sorted(slices)]
