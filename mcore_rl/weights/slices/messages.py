"""Messages of a weight sync: one per bucket, sender and receiver, with the offset of every slice.

Sender and receiver compute the same messages independently; no metadata is exchanged. A message contains all slices of
a bucket that one trainer rank sends to one engine rank. The slices follow each other, each packed in row-major order.
Slices with fewer holders come first: engine ranks on other hosts lack these, so their message is often the beginning of
the message to an engine rank on the sender's host, and needs no memory of its own (weights/loans.py).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import torch

from mcore_rl.config.quantization import UNQUANTIZED
from mcore_rl.weights.quantization import Encoding, TensorBox
from mcore_rl.weights.slices.routes import Route, RouteMap, SliceRouter
from mcore_rl.weights.slices.shard_map import IntArray
from model_converters.mapping.placement import box_shape
from model_converters.mapping.transforms import Shape

ALIGNMENT_BYTES = 64
"""Alignment of slices in a message: one cache line, a multiple of every element size."""


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class Slice:
    """Indices `start : start + length` along `dim` of the HF tensor `hf_name`, complete along all other dims.

    The sender has them in its tensor `mcore_name` from index `local_start` on. `offset` is the position in the
    message, in bytes. With `rows`, it has only the rows [first, end) of dim 0; `dim` is another one then.
    `quantization` and `group`: as in Encoding.
    """

    hf_name: str
    hf_shape: Shape
    dtype: torch.dtype
    dim: int
    start: int
    length: int
    mcore_name: str
    local_start: int
    offset: int
    rows: tuple[int, int] | None = None
    quantization: str = UNQUANTIZED
    group: int = 0

    @property
    def encoding(self) -> Encoding:
        return Encoding(self.dtype, self.quantization, self.group)

    @property
    def shape(self) -> Shape:
        return box_shape(self.hf_shape, self.dim, self.length, self.rows)

    @property
    def first(self) -> Shape:
        """Indices of the first element in the HF tensor."""
        first = [self.start if dim == self.dim else 0 for dim in range(len(self.hf_shape))]
        if self.rows is not None:
            first[0] = self.rows[0]
        return tuple(first)

    @property
    def boxes(self) -> tuple[TensorBox, ...]:
        """Tensors that follow each other in the message, each aligned: the values, or codes and scales."""
        return self.encoding.boxes(self.hf_name, self.first, self.shape)

    @property
    def num_bytes(self) -> int:
        return sum(box.num_bytes for box in self.boxes)

    @property
    def end(self) -> int:
        """Offset of the next slice, in bytes."""
        return self.offset + sum(aligned(box.num_bytes) for box in self.boxes)


@dataclass(frozen=True, slots=True)
class Message:
    """Slices of one bucket from trainer rank `sender` to engine rank `receiver` (counted through all engines)."""

    bucket: int
    receiver: int
    sender: int
    slices: tuple[Slice, ...]

    @property
    def num_bytes(self) -> int:
        """Size including the alignment of the slices."""
        return self.slices[-1].end


def views(message: Message, memory: torch.Tensor) -> list[tuple[Slice, tuple[torch.Tensor, ...]]]:
    """Return each slice with views of its boxes in `memory`, in their dtypes and shapes."""
    found = []
    for each in message.slices:
        offset, places = each.offset, []
        for box in each.boxes:
            places.append(memory[offset : offset + box.num_bytes].view(box.dtype).view(box.shape))
            offset += aligned(box.num_bytes)
        found.append((each, tuple(places)))
    return found


_Slices = dict[tuple[int, int, int], list[tuple[int, Slice]]]
"""Number of holders and slice, without its offset, by (bucket, receiver, sender)."""


def received_by(receivers: Collection[int], route_map: RouteMap, bucket_bytes: int) -> list[Message]:
    """Return all messages to these engine ranks, sorted by bucket, receiver and sender.

    Raises: LayoutError.
    """
    wanted, router = np.array(sorted(receivers)), SliceRouter(route_map)
    slices: _Slices = {}
    for bucket, piece in route_map.shard_map.pieces(bucket_bytes):
        for route in router.routes(piece):
            _append(slices, bucket, route, np.flatnonzero(np.isin(route.receivers, wanted)))
    return _messages(slices)


def sent_by(trainer_rank: int, route_map: RouteMap, bucket_bytes: int) -> list[Message]:
    """Return all messages from a trainer rank, sorted by bucket and receiver.

    Raises: LayoutError.
    """
    router = SliceRouter(route_map)
    slices: _Slices = {}
    for bucket, piece in route_map.shard_map.pieces(bucket_bytes):
        # Route every piece, including those that this rank does not send: the router balances the holders by
        # the bytes of all earlier pieces, so skipping one would give a result that differs from other processes.
        for route in router.routes(piece):
            if trainer_rank in route.holding.ranks:
                _append(slices, bucket, route, np.flatnonzero(route.senders == trainer_rank))
    return _messages(slices)


def _append(slices: _Slices, bucket: int, route: Route, receivers: IntArray) -> None:
    bound, num_holders = route.piece.bound, len(route.holding.ranks)
    for at in receivers.tolist():
        message = slices.setdefault((bucket, int(route.receivers[at]), int(route.senders[at])), [])
        for part, start, length, local_start, rows in route.overlaps(int(route.shards[at])):
            shape = bound.row.shapes[part]
            each = Slice(
                bound.hf[part],
                shape,
                bound.dtype,
                bound.row.dim,
                start,
                length,
                bound.mcore,
                local_start,
                offset=0,
                rows=rows,
                quantization=route.encoding.quantization,
                group=route.encoding.group,
            )
            message.append((num_holders, each))


def _messages(slices: _Slices) -> list[Message]:
    return [Message(*key, _placed(slices[key])) for key in sorted(slices)]


def _placed(slices: list[tuple[int, Slice]]) -> tuple[Slice, ...]:
    """Return the slices of a message with their offsets, those with the fewest holders first."""
    placed, offset = [], 0
    for _, each in sorted(slices, key=lambda pair: pair[0]):
        placed.append(replace(each, offset=offset))
        offset = placed[-1].end
    return tuple(placed)
