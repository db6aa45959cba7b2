"""One rank's part of a sync: its messages, bucket by bucket, and where each slice lies in them.

Sender and receiver compute the same messages without a word to each other. A message holds all that one trainer rank
sends one engine rank of a bucket: slices one behind the other, each packed row by row.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from mcore_rl.weights.plan import aligned
from mcore_rl.weights.slices.needs import Needs, Ranks
from mcore_rl.weights.slices.routes import Places, Route, Router
from model_converters.mapping.placement import Placement
from model_converters.mapping.transforms import Shape


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
    sender: int
    receiver: int
    slices: tuple[Slice, ...]

    @property
    def num_bytes(self) -> int:
        """With what aligns the slices."""
        return self.slices[-1].end


_Slices = dict[tuple[int, int, int], list[Slice]]
"""By bucket, sender and receiver."""


def received_by(
    engine_rank: int, placement: Placement, needs: Needs, places: Places, bucket_bytes: int
) -> list[Message]:
    """Everything that an engine rank gets, in the order of its buckets; of one bucket by sender.

    Raises: LayoutError.
    """
    router = Router(placement, needs, places)
    slices: _Slices = {}
    for bucket, chunk in needs.chunks(bucket_bytes):
        for route in router.routes(chunk):
            _append(slices, bucket, route, np.flatnonzero(route.receivers == engine_rank))
    return _messages(slices)


def sent_by(trainer_rank: int, placement: Placement, needs: Needs, places: Places, bucket_bytes: int) -> list[Message]:
    """Everything that a trainer rank sends, in the order of its buckets; of one bucket by receiver.

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
        message = slices.setdefault((bucket, int(route.senders[at]), int(route.receivers[at])), [])
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
