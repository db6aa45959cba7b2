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

    def units(self, shapes: tuple[Shape, ...], dim: int) -> int:
        """How many indivisible pieces there are along `dim`; the number of shards must divide it."""

    def segments(self, shapes: tuple[Shape, ...], dim: int, shard: int, num_shards: int) -> tuple[Segment, ...]:
        """The segments of shard `shard`, in the order of the local tensor; units() % num_shards must be 0."""


@dataclass(frozen=True)
class Same:
    """The mcore tensor is the HF tensor."""

    num_parts: int = 1

    def units(self, shapes: tuple[Shape, ...], dim: int) -> int:
        return shapes[0][dim]

    def segments(self, shapes: tuple[Shape, ...], dim: int, shard: int, num_shards: int) -> tuple[Segment, ...]:
        length = shapes[0][dim] // num_shards
        return (Segment(0, shard * length, 0, length),)


@dataclass(frozen=True)
class GateUp:
    """Gated linear unit: every shard holds [its rows of gate; its rows of up]."""

    num_parts: int = 2

    def units(self, shapes: tuple[Shape, ...], dim: int) -> int:
        return shapes[0][dim]

    def segments(self, shapes: tuple[Shape, ...], dim: int, shard: int, num_shards: int) -> tuple[Segment, ...]:
        length = shapes[0][dim] // num_shards
        return (Segment(0, shard * length, 0, length), Segment(1, shard * length, length, length))


@dataclass(frozen=True)
class GroupedQKV:
    """Attention input projection: per query group [q heads of the group; k head; v head], groups dealt to shards.

    Worked example, 4 heads in 2 groups: q0 q1 k0 v0 | q2 q3 k1 v1; with two shards each holds one group.
    """

    num_groups: int
    num_parts: int = 3

    def units(self, shapes: tuple[Shape, ...], dim: int) -> int:
        return self.num_groups

    def segments(self, shapes: tuple[Shape, ...], dim: int, shard: int, num_shards: int) -> tuple[Segment, ...]:
        per_group = [shape[dim] // self.num_groups for shape in shapes]
        groups = self.num_groups // num_shards
        found = []
        local_start = 0
        for group in range(shard * groups, (shard + 1) * groups):
            for part, length in enumerate(per_group):
                found.append(Segment(part, group * length, local_start, length))
                local_start += length
        return tuple(found)
