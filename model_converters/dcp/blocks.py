"""Contents of a Megatron-Core distributed checkpoint: blocks of tensors and small pickled objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

import torch

from model_converters.mapping.transforms import Shape

Naming = Literal["default", "by layer", "stacked layers", "by expert"]
"""Scheme of the checkpoint keys of layers and experts. mcore-rl saves "default". The others come from other settings of
megatron-core 0.16.1: one key per layer, layers stacked in one tensor even with experts, one key per expert."""


class Box(NamedTuple):
    """Rectangular block of a tensor: `shape` elements starting at `offset`, one entry per dimension."""

    offset: Shape
    shape: Shape

    @staticmethod
    def of_view(view: torch.Tensor, whole: torch.Tensor) -> Box:
        """Return the block of `whole` that its view `view` covers."""
        assert view.stride() == whole.stride(), "a shard is not a block of its tensor"
        # Strides of a contiguous tensor descend: repeated division splits the distance into one index per dimension.
        left = int(view.storage_offset() - whole.storage_offset())
        offset = []
        for stride in whole.stride():
            start, left = divmod(left, stride) if stride else (0, left)
            offset.append(start)
        return Box(tuple(offset), tuple(view.shape))

    @property
    def volume(self) -> int:
        return prod(self.shape)

    def overlap(self, other: Box) -> Box | None:
        """Return the intersection, or None if it is empty."""
        offset = tuple(map(max, self.offset, other.offset))
        ends = (min(a + n, b + m) for a, n, b, m in zip(*self, *other, strict=True))
        shape = tuple(end - start for start, end in zip(offset, ends, strict=True))
        return Box(offset, shape) if all(size > 0 for size in shape) else None

    def moved(self, origin: Shape, target: Shape) -> Box:
        """Translate the block so that position `origin` moves to `target`."""
        offset = tuple(start - a + b for start, a, b in zip(self.offset, origin, target, strict=True))
        return Box(offset, self.shape)

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this block of `tensor` as a view."""
        for dim, (start, size) in enumerate(zip(*self, strict=True)):
            tensor = tensor.narrow(dim, start, size)
        return tensor


def slice_box(shape: Shape, dim: int, start: int, length: int) -> Box:
    """Return the block of `length` indices from `start` along `dim`, complete along every other dimension."""
    if not shape:
        return Box((), ())
    offset = tuple(start if d == dim else 0 for d in range(len(shape)))
    return Box(offset, tuple(length if d == dim else size for d, size in enumerate(shape)))


def range_boxes(shape: Shape, start: int, stop: int) -> list[Box]:
    """Split elements [start, stop) of the flattened tensor into blocks, in order; at most 2 * len(shape) - 1 blocks."""
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    if len(shape) == 1:
        return [Box((start,), (stop - start,))]
    # Split the range into an incomplete first row, a block of whole rows, and an incomplete last row; "row" means one
    # index of dimension 0. The incomplete rows are split recursively along the other dimensions.
    row = prod(shape[1:])
    first_whole, end_whole = -(-start // row), stop // row
    if first_whole > end_whole:  # the range lies within one row
        return _within_row(shape, end_whole, start - end_whole * row, stop - end_whole * row)
    head = _within_row(shape, first_whole - 1, start % row, row) if start % row else []
    tail = _within_row(shape, end_whole, 0, stop - end_whole * row)
    whole = (end_whole - first_whole, *shape[1:])
    body = [Box((first_whole, *(0,) * (len(shape) - 1)), whole)] if whole[0] else []
    return [*head, *body, *tail]


def _within_row(shape: Shape, index: int, start: int, stop: int) -> list[Box]:
    inner = range_boxes(shape[1:], start, stop)
    return [Box((index, *box.offset), (1, *box.shape)) for box in inner]


def flat_index(shape: Shape, offset: Shape) -> int:
    """Return the index in the flattened tensor of the element at `offset`."""
    index = 0
    for size, position in zip(shape, offset, strict=True):
        index = index * size + position
    return index


@dataclass(frozen=True, slots=True)
class CheckpointChunk:
    """Correspondence of a block of a checkpoint tensor and a block of a rank's parameter.

    Block `stored` of checkpoint tensor `key` (of shape `global_shape`) has the values of block `local` of the rank's
    tensor `mcore_name`. Megatron stacks layers and experts, so `stored` has leading dimensions of size 1 that `local`
    lacks. `padded`: the tensor ends with padding whose length depends on the layout (vocabulary).
    """

    key: str
    global_shape: Shape
    stored: Box
    mcore_name: str
    local: Box
    padded: bool = False


@dataclass(frozen=True, slots=True)
class StateObject:
    """A pickled object that is not a tensor. Megatron's modules expect their objects when they load."""

    key: str
    data: bytes


@dataclass(frozen=True)
class ShardedRankState:
    """Chunks and objects that one rank writes to a checkpoint, without replicas.

    `shapes`: mcore name -> local shape of every tensor of the rank, replicas included.
    """

    chunks: tuple[CheckpointChunk, ...]
    objects: tuple[StateObject, ...]
    shapes: Mapping[str, Shape]
