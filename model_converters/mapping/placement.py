"""Placement of the shards of bound rows on ranks, and the data types of plans."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from model_converters.errors import LayoutError
from model_converters.mapping.layout import Coordinates, TrainLayout
from model_converters.mapping.table import FINAL_NORM, BoundRow, Row, StoredPart, is_sharded
from model_converters.mapping.transforms import Segment, Shape


class Piece(NamedTuple):
    """Slice that an HF tensor and a rank's local mcore tensor have in common.

    It has `length` indices along `dim`, from `start` in the HF tensor and from `local_start` in the mcore tensor, and
    covers all other dimensions completely. `part` is the index of the HF tensor in its row.

    rows: indices [first, end) along dim 0 of the HF tensor, if the rank holds these rows only and `dim` is not 0.
    """

    rank: int
    mcore_name: str
    part: int
    dim: int
    start: int
    length: int
    local_start: int
    rows: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One HF tensor and the pieces that tile it exactly once, sorted by start and rows.

    stored: its place in a stacked tensor, if an export contains that instead.
    """

    hf_name: str
    shape: Shape
    dtype: torch.dtype
    group: str
    pieces: tuple[Piece, ...]
    stored: StoredPart | None = None

    def piece_shape(self, piece: Piece) -> Shape:
        return box_shape(self.shape, piece.dim, piece.length, piece.rows)


def box_shape(shape: Shape, dim: int, length: int, rows: tuple[int, int] | None) -> Shape:
    """Return the shape of `length` indices along `dim` of a tensor, and of rows [first, end) if `rows` is given."""
    if not shape:
        return ()
    part = [*shape[:dim], length, *shape[dim + 1 :]]
    if rows is not None:
        part[0] = rows[1] - rows[0]
    return tuple(part)


class ShardPart(NamedTuple):
    """Rows of one shard of a row's tensor: one of `num_parts` parts along dim 0 (see chunk_range)."""

    shard: int
    num_shards: int
    part: int = 0
    num_parts: int = 1


class Holding(NamedTuple):
    """One shard of a bound row, or a part of its rows, and the ranks that hold a replica of it."""

    ranks: range
    held: ShardPart


class Placement:
    """Assignment of the shards of a table to the ranks of a layout.

    Raises: LayoutError listing everything that the layout does not divide.
    """

    def __init__(self, bound: Sequence[BoundRow], layout: TrainLayout) -> None:
        self.layout = layout
        num_layers = 1 + max((b.layer for b in bound if b.layer is not None), default=-1)
        self._stage_of_layer = layout.stage_of_layer(num_layers)
        self._final_norm_stage = layout.final_norm_stage(num_layers)
        # Layers and experts share rows; check each row once.
        self._check({id(b.row): b.row for b in bound}.values())
        self._check_mtp(bound)

    def holdings(self, bound: BoundRow) -> Iterator[Holding]:
        """Yield one Holding per shard, or per part of one with layout.shard_parameters; none for a tied head that
        shares the embedding's tensor."""
        for ranks, shard, num_shards in self._shards(bound):
            owner = self._expert_part(bound)
            if owner is not None:
                yield Holding(ranks[owner : owner + 1], ShardPart(shard, num_shards))
                continue
            if not (self.layout.shard_parameters and is_sharded(bound)):
                yield Holding(ranks, ShardPart(shard, num_shards))
                continue
            # Tensor-parallel ranks hold the same part of a tensor that they do not divide.
            copies = self.layout.tp if bound.row.axis == "none" and bound.expert is None else 1
            num_parts = len(ranks) // copies
            for part in range(num_parts):
                holders = ranks[part * copies : (part + 1) * copies]
                yield Holding(holders, ShardPart(shard, num_shards, part, num_parts))

    def _shards(self, bound: BoundRow) -> Iterator[tuple[range, int, int]]:
        """Yield (ranks, shard, number of shards)."""
        row, layout = bound.row, self.layout
        # With one stage Megatron's tied head reads the embedding's tensor; with several, the last stage has a copy.
        if row.copy_of_embedding and layout.pp == 1:
            return
        stage = self.stage(bound)
        if bound.expert is not None:
            # Each expert-parallel rank holds a consecutive range of experts.
            ep = bound.expert // (row.num_experts // layout.ep)
            for shard in range(layout.etp):
                yield layout.expert_holders(stage, ep, shard), shard, layout.etp
        elif row.axis == "none":
            yield layout.dense_holders(stage, None), 0, 1
        else:
            for shard in range(layout.tp):
                yield layout.dense_holders(stage, shard), shard, layout.tp

    def stage(self, bound: BoundRow) -> int:
        if bound.layer is not None:
            return self._stage_of_layer[bound.layer]
        if bound.mcore == FINAL_NORM:
            return self._final_norm_stage
        return 0 if bound.row.place == "embedding" else self.layout.pp - 1

    def shard_at(self, bound: BoundRow, at: Coordinates) -> tuple[int, int] | None:
        """Return (shard, num_shards) of the row on the rank with coordinates `at`, or None."""
        row, layout = bound.row, self.layout
        if self.stage(bound) != at.pp or (row.copy_of_embedding and layout.pp == 1):
            return None
        if bound.expert is not None:
            is_here = bound.expert // (row.num_experts // layout.ep) == at.ep
            return (at.etp, layout.etp) if is_here else None
        return (0, 1) if row.axis == "none" else (at.tp, layout.tp)

    def part_at(self, bound: BoundRow, at: Coordinates) -> ShardPart | None:
        """Return the part of the row that the rank with coordinates `at` holds, or None."""
        shard, layout = self.shard_at(bound, at), self.layout
        owner = self._expert_part(bound)
        if shard is None or owner not in (None, at.edp):
            return None
        if owner is not None or not (layout.shard_parameters and is_sharded(bound)):
            return ShardPart(*shard)
        if bound.expert is not None:
            return ShardPart(*shard, at.edp, layout.edp)
        return ShardPart(*shard, at.cp + layout.cp * at.dp, layout.cp * layout.dp)

    def _expert_part(self, bound: BoundRow) -> int | None:
        """Return the data-parallel part that has an expert whole, or None if parts have rows of each of its tensors.

        If ranks hold HF tensors, the experts of a layer are one parameter, and its rows are whole experts.
        """
        layout = self.layout
        if bound.expert is None or not (layout.shard_parameters and layout.hf_tensors):
            return None
        _, each = chunk_range(bound.row.num_experts, 0, layout.edp)
        return bound.expert // each

    def _check_mtp(self, bound: Sequence[BoundRow]) -> None:
        placed = self.layout.num_mtp_layers
        num_mtp_layers = len({b.mcore.split(".")[2] for b in bound if b.mcore.startswith("mtp.layers.")})
        if placed is not None and placed != num_mtp_layers:
            raise LayoutError(
                f"pipeline_layout places {placed} multi-token-prediction layers (m), but the model has {num_mtp_layers}"
            )

    def _check(self, rows: Iterable[Row]) -> None:
        layout = self.layout
        rows = list(rows)
        problems = set()
        if layout.ep > 1 and not any(row.num_experts for row in rows):
            problems.add(f"ep {layout.ep} needs a model with experts; set ep to 1")
        for row in rows:
            if row.num_experts % layout.ep:
                problems.add(f"{row.num_experts} experts are not a multiple of ep {layout.ep}")
            if row.num_experts and row.axis == "none" and layout.etp > 1:
                problems.add(f"etp {layout.etp} does not divide {row.mcore}; set etp to 1")
            size = {"tp": layout.tp, "etp": layout.etp, "none": 1}[row.axis]
            refusal = row.transform.refusal(row.shapes, row.dim, size) if size > 1 else ""
            if refusal:
                problems.add(f"{row.split_by or row.mcore} {refusal.format(axis=row.axis)}")
        if problems:
            raise LayoutError("; ".join(sorted(problems)))


@lru_cache(maxsize=4096)
def segments_of(row: Row, shard: int, num_shards: int) -> tuple[Segment, ...]:
    """Apply the row's transform to one shard. Cached, because layers and experts share rows."""
    # A scalar has no dimension to divide; treat it as one index.
    if not row.shapes[0]:
        return (Segment(0, 0, 0, 1),)
    return row.transform.segments(row.shapes, row.dim, shard, num_shards)


def local_shape(row: Row, num_shards: int) -> Shape:
    """Return the shape of one rank's mcore tensor."""
    shape = row.shapes[0]
    if not shape:
        return ()
    length = row.transform.local_length(row.shapes, row.dim, num_shards)
    return (*shape[: row.dim], length, *shape[row.dim + 1 :])


def chunk_range(length: int, part: int, num_parts: int) -> tuple[int, int]:
    """Return the indices [first, end) of a part, by the rule of torch.chunk: all parts but the last ones have the same
    length; the last ones may be shorter or empty."""
    each = -(-length // num_parts)
    return min(part * each, length), min((part + 1) * each, length)


def held_shape(row: Row, held: ShardPart) -> Shape:
    """Return the shape of the tensor that a rank stores for a part of a shard."""
    shape = local_shape(row, held.num_shards)
    if held.num_parts == 1:
        return shape
    first, end = chunk_range(shape[0], held.part, held.num_parts)
    return (end - first, *shape[1:])


class HeldSegment(NamedTuple):
    """A Segment of a part of a shard; `local_start` counts within the part. `rows` is like Piece's."""

    part: int
    start: int
    local_start: int
    length: int
    rows: tuple[int, int] | None


@lru_cache(maxsize=1 << 16)
def held_segments(row: Row, held: ShardPart) -> tuple[HeldSegment, ...]:
    """Return the segments of a shard, cut to the rows of `held`."""
    segments = segments_of(row, held.shard, held.num_shards)
    if held.num_parts == 1:
        return tuple(HeldSegment(*segment, None) for segment in segments)
    first, end = chunk_range(local_shape(row, held.num_shards)[0], held.part, held.num_parts)
    if row.dim:
        return tuple(HeldSegment(*segment, (first, end)) for segment in segments if first < end)
    cut = []
    for part, start, local_start, length in segments:
        low, high = max(local_start, first), min(local_start + length, end)
        if low < high:
            cut.append(HeldSegment(part, start + low - local_start, low - first, high - low, None))
    return tuple(cut)
