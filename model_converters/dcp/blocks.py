"""What a megatron-core distributed checkpoint is made of: blocks of tensors, and small objects beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

import torch

from model_converters.mapping.transforms import Shape

Naming = Literal["default", "by layer", "stacked layers", "by expert"]
"""How a checkpoint keys layers and experts. "default" is what a model of mcore-rl saves; the others are what other
settings of megatron-core 0.16.1 give: layers never stacked, stacked even with experts, experts never stacked."""


class Box(NamedTuple):
    """A block of a tensor: `shape` elements from `offset`, dimension by dimension."""

    offset: Shape
    shape: Shape

    @staticmethod
    def of_view(view: torch.Tensor, whole: torch.Tensor) -> Box:
        """Where `view`, a block of the tensor `whole`, lies in it."""
        assert view.stride() == whole.stride(), "a shard is no block of its tensor"
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
        """What both cover, or None."""
        offset = tuple(map(max, self.offset, other.offset))
        ends = (min(a + n, b + m) for a, n, b, m in zip(*self, *other, strict=True))
        shape = tuple(end - start for start, end in zip(offset, ends, strict=True))
        return Box(offset, shape) if all(size > 0 for size in shape) else None

    def moved(self, origin: Shape, target: Shape) -> Box:
        """The same block where `origin` lies at `target`."""
        offset = tuple(start - a + b for start, a, b in zip(self.offset, origin, target, strict=True))
        return Box(offset, self.shape)

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The block of `tensor`, a view."""
        for dim, (start, size) in enumerate(zip(*self, strict=True)):
            tensor = tensor.narrow(dim, start, size)
        return tensor


def slice_box(shape: Shape, dim: int, start: int, length: int) -> Box:
    """`length` indices of `dim` from `start`, and all of every other dimension."""
    if not shape:
        return Box((), ())
    offset = tuple(start if d == dim else 0 for d in range(len(shape)))
    return Box(offset, tuple(length if d == dim else size for d, size in enumerate(shape)))


def range_boxes(shape: Shape, start: int, stop: int) -> list[Box]:
    """The elements [start, stop) of a flattened tensor as blocks of it, in order; at most 2 len(shape) - 1."""
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    if len(shape) == 1:
        return [Box((start,), (stop - start,))]
    row = prod(shape[1:])
    first_whole, end_whole = -(-start // row), stop // row
    if first_whole > end_whole:  # within one row
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
    """Where the element at `offset` lies in the flattened tensor."""
    index = 0
    for size, position in zip(shape, offset, strict=True):
        index = index * size + position
    return index


@dataclass(frozen=True, slots=True)
class CheckpointChunk:
    """The block `stored` of the checkpoint's tensor `key` is the block `local` of one rank's tensor `mcore_name`.

    `stored` has leading axes of size 1 that `local` lacks: megatron stacks layers and experts. `padded`: the end of
    the tensor is padding that another layout may cut elsewhere (the vocabulary).
    """

    key: str
    global_shape: Shape
    stored: Box
    mcore_name: str
    local: Box
    padded: bool = False


@dataclass(frozen=True, slots=True)
class StateObject:
    """Something that is no tensor, as it is written: megatron's modules expect theirs when they load."""

    key: str
    data: bytes


@dataclass(frozen=True)
class ShardedRankState:
    """What one rank writes to a checkpoint, replicas left out; `shapes` are those of all its tensors by mcore name."""

    chunks: tuple[CheckpointChunk, ...]
    objects: tuple[StateObject, ...]
    shapes: Mapping[str, Shape]
