"""Transforms: composition of one rank's slice of an mcore tensor from slices of HF tensors.

A transform is a list of segments along one dimension: `length` indices of the local mcore tensor from `local_start`
equal `length` indices of HF tensor `part` from `start`. The same list is used for loading (each HF slice is read into
its place) and for export (each segment is a view of the local tensor). The two directions therefore cannot disagree,
and neither needs a temporary tensor.

Segments describe ONE shard: each HF tensor is sliced first, then the slices are joined. Joining whole tensors and
slicing afterwards would give rank 0 all of gate and rank 1 all of up.
"""

from __future__ import annotations

from collections.abc import Iterator
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


class Section(NamedTuple):
    """Indices of an HF tensor that are consecutive in the mcore tensor: `length` indices from `start` of each block.

    The HF tensor `part` consists of `num_blocks` equal blocks; length 0: all indices of a block from `start`.
    Example, the second index of each of two blocks of three: . x . . x .
    """

    part: int
    num_blocks: int = 1
    start: int = 0
    length: int = 0

    def per_block(self, shape: Shape, dim: int) -> int:
        """Return the number of indices that the section has of each block."""
        return self.length or shape[dim] // self.num_blocks - self.start

    def size(self, shape: Shape, dim: int) -> int:
        """Return the number of indices of the section."""
        return self.num_blocks * self.per_block(shape, dim)

    def segments(self, shape: Shape, dim: int, first: int, length: int, local_start: int) -> Iterator[Segment]:
        """Yield the segments of the section's indices [first, first + length), which are local from `local_start`."""
        block, each = shape[dim] // self.num_blocks, self.per_block(shape, dim)
        if each == block:  # the blocks are consecutive
            yield Segment(self.part, first, local_start, length)
            return
        for number in range(first // each, -(-(first + length) // each)):
            low, high = max(number * each, first), min((number + 1) * each, first + length)
            start = number * (block - each) + self.start + low
            yield Segment(self.part, start, local_start + low - first, high - low)


@dataclass(frozen=True)
class Sections:
    """Concatenation of `sections`; a shard is [its share of the first section; its share of the second; ...].

    num_units: number of units, such as heads, of every section that are never cut; 0: single indices.

    Example, sections a (4 indices) and b (2 indices) on two shards: a0 a1 b0 | a2 a3 b1
    """

    sections: tuple[Section, ...]
    num_units: int = 0

    @property
    def num_parts(self) -> int:
        return 1 + max(section.part for section in self.sections)

    def refusal(self, shapes: tuple[Shape, ...], dim: int, num_shards: int) -> str:
        return _indivisible(self.num_units or shapes[0][dim], num_shards)

    def local_length(self, shapes: tuple[Shape, ...], dim: int, num_shards: int) -> int:
        return sum(section.size(shapes[section.part], dim) // num_shards for section in self.sections)

    def segments(self, shapes: tuple[Shape, ...], dim: int, shard: int, num_shards: int) -> tuple[Segment, ...]:
        segments: list[Segment] = []
        local_start = 0
        for section in self.sections:
            shape = shapes[section.part]
            length = section.size(shape, dim) // num_shards
            segments += section.segments(shape, dim, shard * length, length, local_start)
            local_start += length
        return tuple(segments)


@dataclass(frozen=True)
class GateUp(Sections):
    """Gated linear unit: a shard is [its rows of gate; its rows of up]."""

    sections: tuple[Section, ...] = (Section(0), Section(1))


@dataclass(frozen=True)
class GroupedQKV:
    """Fused attention projection: for each query group [q heads of the group; k head; v head], cut into equal shards.

    gated: the first HF tensor has [query; output gate] of each head, and a group has [q heads; gates; k head; v head].

    Example, 4 heads in 2 groups: two shards are q0 q1 k0 v0 | q2 q3 k1 v1, four are q0 q1 | k0 v0 | q2 q3 | k1 v1. If a
    group is divided, Megatron gathers its activations before attention.
    """

    num_groups: int
    num_parts: int = 3
    gated: bool = False

    def num_heads(self, shapes: tuple[Shape, ...], dim: int) -> int:
        """Return the number of query heads."""
        per_group = shapes[0][dim] // shapes[1][dim]
        return self.num_groups * (per_group // 2 if self.gated else per_group)

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
        # Walk over the groups that overlap the shard [first, last) and intersect the sections of each group with it.
        sections = self._sections(shapes, dim)
        per_group = [section.size(shapes[section.part], dim) // self.num_groups for section in sections]
        length = self.local_length(shapes, dim, num_shards)
        first, last = shard * length, (shard + 1) * length
        segments: list[Segment] = []
        for group in range(first // sum(per_group), -(-last // sum(per_group))):
            begin = group * sum(per_group)
            for section, rows in zip(sections, per_group, strict=True):
                low, high = max(begin, first), min(begin + rows, last)
                if low < high:
                    inside = group * rows + low - begin
                    segments += section.segments(shapes[section.part], dim, inside, high - low, low - first)
                begin += rows
        return tuple(segments)

    def _sections(self, shapes: tuple[Shape, ...], dim: int) -> tuple[Section, ...]:
        """Return the sections of a group, with the indices of all groups."""
        if not self.gated:
            return Section(0), Section(1), Section(2)
        heads, head_dim = self.num_heads(shapes, dim), shapes[1][dim] // self.num_groups
        return Section(0, heads, 0, head_dim), Section(0, heads, head_dim, head_dim), Section(1), Section(2)


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
