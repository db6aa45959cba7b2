"""Divided blocks: blocks of quantised tensors that no slice of a trainer rank contains completely.

Engines keep whole blocks, and the plan cuts pieces between blocks, but a trainer may cut anywhere: columns over tensor
parallel ranks, rows over ranks that share a parameter, heads of 64 rows in a fused projection. Example, 192 columns on
two ranks: block 0 is divided, with 96 columns on rank 0 and 32 on rank 1; block 1 is whole, on rank 1.

The scale of a divided block needs the largest magnitude over all its parts. The ranks that hold one replica of a tensor
form a group, which combines these magnitudes before the first round (block_maxima.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mcore_rl.config.quantization import BLOCK, FP8
from mcore_rl.weights.quantization import block_range
from mcore_rl.weights.slices.messages import Slice
from mcore_rl.weights.slices.shard_map import IndexRun, IntArray, ShardMap, run_box
from model_converters.mapping.placement import Holding, Placement, ShardPart, held_segments
from model_converters.mapping.table import BoundRow, Row
from model_converters.mapping.transforms import Shape

BlockMask = npt.NDArray[np.bool_]
"""Shapes: [block rows, block columns] of a matrix."""


@dataclass(frozen=True, eq=False)
class DividedTensor:
    """An HF tensor with divided blocks, marked in `mask`. `held`: all of the tensor that a rank holds."""

    hf_name: str
    mask: BlockMask
    held: tuple[Slice, ...]


@dataclass(frozen=True, eq=False)
class BlockGroup:
    """Trainer ranks that together hold each of `tensors` once. All members list the tensors in the same order.

    positions: by rank, the divided blocks of which the rank holds parts, as positions in the blocks of all tensors'
    masks, one tensor after the other. A rank without an entry holds no part. Only the first rank lists all members.
    """

    ranks: tuple[int, ...]
    tensors: tuple[DividedTensor, ...]
    positions: dict[int, IntArray]


class _Divided(NamedTuple):
    """Divided blocks of an HF tensor. positions[i]: blocks in `mask` of which holding number i holds parts."""

    mask: BlockMask
    positions: tuple[IntArray, ...]


def divided_blocks(rank: int, placement: Placement, shard_map: ShardMap, *, frozen: bool = False) -> list[BlockGroup]:
    """Return the groups of a trainer rank, sorted by their ranks, with its `frozen` tensors or with all others. Groups
    of one rank need no messages."""
    groups: dict[tuple[int, ...], list[tuple[DividedTensor, _Divided]]] = {}
    for bound in shard_map.rows:
        # INT4 groups are never divided: `Encoding` rejects such slices.
        if shard_map.encoding(bound).quantization != FP8 or shard_map.is_frozen(bound) != frozen:
            continue
        holdings = list(placement.holdings(bound))
        own = next((holding for holding in holdings if rank in holding.ranks), None)
        if own is None:
            continue
        # Holders at the same position of their ranges hold parts of the same replica.
        replica = own.ranks.index(rank)
        ranks = tuple(holding.ranks[replica] for holding in holdings)
        for part, divided in enumerate(_divided_of(bound.row, tuple(holding.held for holding in holdings))):
            if divided.mask.any():
                tensor = DividedTensor(bound.hf[part], divided.mask, tuple(_held(bound, part, own)))
                groups.setdefault(ranks, []).append((tensor, divided))
    return [_group(rank, ranks, groups[ranks]) for ranks in sorted(groups)]


def _group(rank: int, ranks: tuple[int, ...], members: Sequence[tuple[DividedTensor, _Divided]]) -> BlockGroup:
    starts = np.cumsum([0, *(int(tensor.mask.sum()) for tensor, _ in members)])
    positions = {}
    for index, other in enumerate(ranks):
        if rank in (other, ranks[0]):
            of_rank = [start + divided.positions[index] for start, (_, divided) in zip(starts, members, strict=False)]
            joined = np.concatenate(of_rank)
            if len(joined):
                positions[other] = joined
    return BlockGroup(ranks, tuple(tensor for tensor, _ in members), positions)


def inner_blocks(start: int, length: int, size: int) -> range:
    """Return the blocks that lie completely in `length` indices from `start`, of a dimension of `size`."""
    end = start + length
    return range(-(-start // BLOCK), -(-end // BLOCK) if end == size else end // BLOCK)


def partial_boxes(first: Shape, shape: Shape, size: Shape) -> Iterator[tuple[slice, slice]]:
    """Yield parts of a box of a matrix that cover its parts of divided blocks, as indices relative to `first`.

    Up to two strips of rows and two of columns, each at most one block wide. size: shape of the matrix.
    """
    everything = tuple(slice(0, length) for length in shape)
    for dim in range(2):
        start, end = first[dim], first[dim] + shape[dim]
        cuts = [] if start % BLOCK == 0 else [(start, min(end, (start // BLOCK + 1) * BLOCK))]
        if end % BLOCK and end < size[dim]:
            cuts.append((max(start, end // BLOCK * BLOCK), end))
        for low, high in dict.fromkeys(cuts):
            strip = slice(low - start, high - start)
            yield (strip, everything[1]) if dim == 0 else (everything[0], strip)


@lru_cache(maxsize=1 << 12)
def _divided_of(row: Row, held: tuple[ShardPart, ...]) -> tuple[_Divided, ...]:
    """Return the divided blocks of each HF tensor of a row, whose shards are held in these parts."""
    shapes = [tuple(-(-size // BLOCK) for size in shape) for shape in row.shapes]
    masks = [np.zeros(shape, bool) for shape in shapes]
    touched = [[np.zeros(shape, bool) for shape in shapes] for _ in held]
    for of_holding, shard_part in zip(touched, held, strict=True):
        for segment in held_segments(row, shard_part):
            part, size = segment.part, row.shapes[segment.part]
            first, shape = run_box(row, IndexRun(part, segment.start, segment.length), segment.rows)
            here = tuple(slice(each.start, each.stop) for each in map(block_range, first, shape))
            inner = tuple(
                slice(each.start, max(each.start, each.stop)) for each in map(inner_blocks, first, shape, size)
            )
            divided = np.zeros_like(masks[part])
            divided[here] = True
            divided[inner] = False
            masks[part] |= divided
            of_holding[part][here] = True
    return tuple(
        _Divided(mask, tuple(np.flatnonzero(of_holding[part][mask]) for of_holding in touched))
        for part, mask in enumerate(masks)
    )


def _held(bound: BoundRow, part: int, holding: Holding) -> Iterator[Slice]:
    row = bound.row
    for segment in held_segments(row, holding.held):
        if segment.part == part:
            yield Slice(
                bound.hf[part], row.shapes[part], bound.dtype, row.dim, segment.start, segment.length, bound.mcore,
                segment.local_start, offset=0, rows=segment.rows, quantization=FP8,
            )  # fmt: skip
