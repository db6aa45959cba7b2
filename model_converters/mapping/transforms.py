"""Transforms: composition of one rank's slice of an mcore tensor from slices of HF tensors.

A transform is a list of segments along one dimension: `length` indices of the local mcore tensor from `local_start`
equal `length` indices of HF tensor `part` from `start`. The same list is used for loading (each HF slice is read into
its place) and for export (each segment is a view of the local tensor). The two directions therefore cannot disagree,
and neither needs a temporary tensor.

Segments describe ONE shard: each HF tensor is sliced first, then the slices are joined. Joining whole tensors and
slicing afterwards would give rank 0 all of gate and rank 1 all of up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

Shape = tuple[int, ...]


class Segment(NamedTuple):
    """Range of indices that the local mcore tensor shares with one HF tensor. Units: indices of the row's dim."""

    part: int
    start: int
    local_start: int
    length: int


class Transform(Protocol):
    """Mapping of the HF tensors (parts) of a row to the shards of its mcore tensor. Frozen and hashable."""

    @property
    def num_parts(self) -> int: ...

    def refusal(self, shapes: tuple[Shape, ...], dim: int, num_shards: int) -> str:
        """Return why `num_shards` shards are impossible, as text that follows the name of the size; "" if possible."""

    def local_length(self, shapes: tuple[Shape, ...], dim: int, num_shards: int) -> int:
        """Return the length of every shard along `dim`. Indices without a segment are zero padding."""

    def segments(self, shapes: tuple[Shape, ...], dim: int, shard: int, num_shards: int) -> tuple[Segment, ...]:
        """Return the segments of shard `shard` in the order of the local tensor. Requires refusal() == ""."""


@dataclass(frozen=True)
class Same:
    """The mcore tensor is the HF tensor."""

    num_parts: int = 1

    def refusal(self, shapes: tuple[Shape, ...], dim: int, num_shards: int) -> str:
        return _indivisible(shapes[0][dim], num_shards)

    def local_length(self, shapes: tuple[Shape, ...], dim: int, num_shards: int) -> int:
        return shapes[0][dim] // num_shards

    def segments(self, shapes: tuple[Shape, ...], dim: int, shard: int, num_shards: int) -> tuple[Segment, ...]:
        length = shapes[0][dim] // num_shards
        return (Segment(0, shard * length, 0, length),)


@dataclass(frozen=True)
class Vocabulary:
    """The HF tensor, padded at the end with the fewest zero rows that make all shards equally long.

    Example, 5 rows on 4 shards: 0 1 | 2 3 | 4 . | . .
    """

    num_parts: int = 1

    def refusal(self, shapes: tuple[Shape, ...], dim: int, num_shards: int) -> str:
        return ""

    def local_length(self, shapes: tuple[Shape, ...], dim: int, num_shards: int) -> int:
        # Rounded up: only the last shards have padding.
        return -(-shapes[0][dim] // num_shards)

    def segments(self, shapes: tuple[Shape, ...], dim: int, shard: int, num_shards: int) -> tuple[Segment, ...]:
        length = self.local_length(shapes, dim, num_shards)
        # Not positive for a shard that consists of padding only.
        real = min(shapes[0][dim] - shard * length, length)
        return (Segment(0, shard * length, 0, real),) if real > 0 else ()


@dataclass(frozen=True)
class Heads(Same):
    """The mcore tensor is the HF tensor, and shards consist of whole attention heads."""

    num_parts: int = 1
    num_heads: int = 1

    def refusal(self, shapes: tuple[Shape, ...], dim: int, num_shards: int) -> str:
        return _indivisible(self.num_heads, num_shards)


@dataclass(frozen=True)
class KeyValueHeads(Heads):
    """Heads of keys or values. With more engine ranks than heads, several ranks keep the same head."""


@dataclass(frozen=True)
class GateUp:
    """Gated linear unit: a shard is [its rows of gate; its rows of up]."""

    num_parts: int = 2

    def refusal(self, shapes: tuple[Shape, ...], dim: int, num_shards: int) -> str:
        return _indivisible(shapes[0][dim], num_shards)

    def local_length(self, shapes: tuple[Shape, ...], dim: int, num_shards: int) -> int:
        return 2 * (shapes[0][dim] // num_shards)

    def segments(self, shapes: tuple[Shape, ...], dim: int, shard: int, num_shards: int) -> tuple[Segment, ...]:
        length = shapes[0][dim] // num_shards
        return (Segment(0, shard * length, 0, length), Segment(1, shard * length, length, length))


@dataclass(frozen=True)
class GroupedQKV:
    """Fused attention projection: for each query group [q heads of the group; k head; v head], cut into equal shards.

    Example, 4 heads in 2 groups: two shards are q0 q1 k0 v0 | q2 q3 k1 v1, four are q0 q1 | k0 v0 | q2 q3 | k1 v1. If a
    group is divided, Megatron gathers its activations before attention.
    """

    num_groups: int
    num_parts: int = 3

    def refusal(self, shapes: tuple[Shape, ...], dim: int, num_shards: int) -> str:
        if num_shards <= self.num_groups:
            return _indivisible(self.num_groups, num_shards)
        # More shards than groups: every group is cut into equally many shards.
        if num_shards % self.num_groups:
            return f"{self.num_groups} is neither a multiple nor a divisor of {{axis}} {num_shards}"
        return _indivisible(sum(shape[dim] for shape in shapes), num_shards)

    def local_length(self, shapes: tuple[Shape, ...], dim: int, num_shards: int) -> int:
        return sum(shape[dim] for shape in shapes) // num_shards

    def segments(self, shapes: tuple[Shape, ...], dim: int, shard: int, num_shards: int) -> tuple[Segment, ...]:
        # Walk over the groups that overlap the shard [first, last) and intersect q, k and v of each group with it.
        per_group = [shape[dim] // self.num_groups for shape in shapes]
        length = self.local_length(shapes, dim, num_shards)
        first, last = shard * length, (shard + 1) * length
        segments = []
        for group in range(first // sum(per_group), -(-last // sum(per_group))):
            begin = group * sum(per_group)
            for part, rows in enumerate(per_group):
                low, high = max(begin, first), min(begin + rows, last)
                if low < high:
                    segments.append(Segment(part, group * rows + low - begin, low - first, high - low))
                begin += rows
        return tuple(segments)


@dataclass(frozen=True)
class Stacked:
    """Concatenation of the whole HF tensors; every rank holds all of them.

    Example, three tensors of 2 rows: a0 a1 b0 b1 c0 c1
    """

    num_parts: int

    def refusal(self, shapes: tuple[Shape, ...], dim: int, num_shards: int) -> str:
        return "is never divided"

    def local_length(self, shapes: tuple[Shape, ...], dim: int, num_shards: int) -> int:
        return sum(shape[dim] for shape in shapes)

    def segments(self, shapes: tuple[Shape, ...], dim: int, shard: int, num_shards: int) -> tuple[Segment, ...]:
        segments, start = [], 0
        for part, shape in enumerate(shapes):
            segments.append(Segment(part, 0, start, shape[dim]))
            start += shape[dim]
        return tuple(segments)


@dataclass(frozen=True)
class Subset:
    """Only some `parts` of the tensor that `whole` composes from HF tensors of `all_shapes`; the rest is padding.

    Example, q and v of GroupedQKV with two heads in one group: q0 q1 . v0
    """

    whole: Transform
    all_shapes: tuple[Shape, ...]
    parts: tuple[int, ...]

    @property
    def num_parts(self) -> int:
        return len(self.parts)

    def refusal(self, shapes: tuple[Shape, ...], dim: int, num_shards: int) -> str:
        return self.whole.refusal(self.all_shapes, dim, num_shards)

    def local_length(self, shapes: tuple[Shape, ...], dim: int, num_shards: int) -> int:
        return self.whole.local_length(self.all_shapes, dim, num_shards)

    def segments(self, shapes: tuple[Shape, ...], dim: int, shard: int, num_shards: int) -> tuple[Segment, ...]:
        # Segments of absent parts are dropped, so their indices stay padding.
        every = self.whole.segments(self.all_shapes, dim, shard, num_shards)
        return tuple(s._replace(part=self.parts.index(s.part)) for s in every if s.part in self.parts)


def _indivisible(units: int, num_shards: int) -> str:
    return f"{units} is not a multiple of {{axis}} {num_shards}" if units % num_shards else ""
