"""How one rank's slice of an mcore tensor is composed of slices of HF tensors.

Every transform is a table of segments along one dimension: `length` indices of the local mcore tensor from
`local_start` are `length` indices of HF part `part` from `start`. The same table loads (read each HF slice straight
into its place) and exports (each segment is a view of the local tensor), so a transform cannot disagree with its own
inverse, and neither direction needs a temporary tensor.

The segments belong to ONE shard: each HF part is sliced first, then the slices are joined. Joining whole parts and
slicing afterwards would give rank 0 all of gate and rank 1 all of up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

Shape = tuple[int, ...]


class Segment(NamedTuple):
    """A run of indices that the local mcore tensor and one HF part have in common. Units: indices of the row's dim."""

    part: int
    start: int
    local_start: int
    length: int


class Transform(Protocol):
    """Maps the HF parts of a row to the shards of its mcore tensor; frozen and hashable."""

    @property
    def num_parts(self) -> int: ...

    def refusal(self, shapes: tuple[Shape, ...], dim: int, num_shards: int) -> str:
        """Why there cannot be so many shards, to follow the name of what is divided; "" when there can."""

    def local_length(self, shapes: tuple[Shape, ...], dim: int, num_shards: int) -> int:
        """Length of every shard along `dim`: the same for all. What no segment covers is padding, zero."""

    def segments(self, shapes: tuple[Shape, ...], dim: int, shard: int, num_shards: int) -> tuple[Segment, ...]:
        """The segments of shard `shard`, in the order of the local tensor; refusal() must be ""."""


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
    """The HF tensor with rows of zeros behind it, as few as make the shards equal.

    Worked example, 5 entries on 4 shards: 0 1 | 2 3 | 4 . | . .
    """

    num_parts: int = 1

    def refusal(self, shapes: tuple[Shape, ...], dim: int, num_shards: int) -> str:
        return ""

    def local_length(self, shapes: tuple[Shape, ...], dim: int, num_shards: int) -> int:
        return -(-shapes[0][dim] // num_shards)

    def segments(self, shapes: tuple[Shape, ...], dim: int, shard: int, num_shards: int) -> tuple[Segment, ...]:
        length = self.local_length(shapes, dim, num_shards)
        real = min(shapes[0][dim] - shard * length, length)
        return (Segment(0, shard * length, 0, real),) if real > 0 else ()


@dataclass(frozen=True)
class Heads(Same):
    """The mcore tensor is the HF tensor, and only whole attention heads can be dealt to shards."""

    num_parts: int = 1
    num_heads: int = 1

    def refusal(self, shapes: tuple[Shape, ...], dim: int, num_shards: int) -> str:
        return _indivisible(self.num_heads, num_shards)


@dataclass(frozen=True)
class GateUp:
    """Gated linear unit: every shard holds [its rows of gate; its rows of up]."""

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
    """Attention input projection: per query group [q heads of the group; k head; v head], cut into equal shards.

    Worked example, 4 heads in 2 groups: q0 q1 k0 v0 | q2 q3 k1 v1; with two shards each holds one group, with four
    q0 q1 | k0 v0 | q2 q3 | k1 v1: megatron gathers the activations of such a group before it attends.
    """

    num_groups: int
    num_parts: int = 3

    def refusal(self, shapes: tuple[Shape, ...], dim: int, num_shards: int) -> str:
        if num_shards <= self.num_groups:
            return _indivisible(self.num_groups, num_shards)
        if num_shards % self.num_groups:
            return f"{self.num_groups} is neither a multiple nor a divisor of {{axis}} {num_shards}"
        return _indivisible(sum(shape[dim] for shape in shapes), num_shards)

    def local_length(self, shapes: tuple[Shape, ...], dim: int, num_shards: int) -> int:
        return sum(shape[dim] for shape in shapes) // num_shards

    def segments(self, shapes: tuple[Shape, ...], dim: int, shard: int, num_shards: int) -> tuple[Segment, ...]:
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
    """The HF parts, whole, one behind the other; every rank holds them all.

    Worked example, three parts of 2: a0 a1 b0 b1 c0 c1
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
    """Some `parts` of a tensor that `whole` composes of parts of `all_shapes`, each in its place; that of the others is
    padding.

    Worked example, q and v of GroupedQKV with two heads in one group: q0 q1 . v0
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
        every = self.whole.segments(self.all_shapes, dim, shard, num_shards)
        return tuple(s._replace(part=self.parts.index(s.part)) for s in every if s.part in self.parts)


def _indivisible(units: int, num_shards: int) -> str:
    return f"{units} is not a multiple of {{axis}} {num_shards}" if units % num_shards else ""
