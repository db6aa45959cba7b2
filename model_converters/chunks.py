"""What a megatron-core distributed checkpoint is made of: blocks of tensors, and small objects beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

import torch

from model_converters.transforms import Shape

Naming = Literal["default", "by layer", "stacked layers", "by expert"]
"""How a checkpoint keys layers and experts. "default" is what a model of mcore-rl saves; the others are what other
settings of megatron-core 0.16.1 give: layers never stacked, stacked even with experts, experts never stacked."""


class Box(NamedTuple):
    """A block of a tensor: `shape` elements from `offset`, dimension by dimension."""

    offset: Shape
    shape: Shape

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


def run(shape: Shape, dim: int, start: int, length: int) -> Box:
    """`length` indices of `dim` from `start`, and all of every other dimension."""
    if not shape:
        return Box((), ())
    offset = tuple(start if d == dim else 0 for d in range(len(shape)))
    return Box(offset, tuple(length if d == dim else size for d, size in enumerate(shape)))


@dataclass(frozen=True, slots=True)
class Chunk:
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
class RankState:
    """What one rank writes to a checkpoint, replicas left out; `shapes` are those of all its tensors by mcore name."""

    chunks: tuple[Chunk, ...]
    objects: tuple[StateObject, ...]
    shapes: Mapping[str, Shape]
