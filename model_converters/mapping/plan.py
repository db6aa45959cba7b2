"""Plans for loading and export: the slice of each HF tensor on each rank, a pure function of bound table and layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from math import prod

import torch

from model_converters.errors import ConversionError
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.placement import (
    Piece,
    Placement,
    ShardPart,
    TensorPlan,
    held_segments,
    held_shape,
)
from model_converters.mapping.table import BoundRow, exported_parts
from model_converters.mapping.transforms import Shape


@dataclass(frozen=True, slots=True)
class TensorLoad:
    """Slices that one rank reads for one local mcore tensor.

    sources: (HF name, piece); indices that no piece covers are padding.
    copies: optional HF tensors that must have the same values.
    """

    mcore_name: str
    shape: Shape
    bound: BoundRow
    sources: tuple[tuple[str, Piece], ...]
    copies: tuple[str, ...] = ()

    @property
    def padded(self) -> bool:
        covered = sum(piece.length for _, piece in self.sources)
        return bool(self.shape) and covered < self.shape[self.bound.row.dim]


def local_shapes(bound: Sequence[BoundRow], layout: TrainLayout, rank: int) -> dict[str, Shape]:
    """Return canonical name -> local shape for all tensors of `rank`."""
    return {load.mcore_name: load.shape for load in load_plan(bound, layout, rank)}


def export_plan(bound: Sequence[BoundRow], layout: TrainLayout) -> list[TensorPlan]:
    """Assign each slice of every HF tensor to one writing rank. Tensors of one layer are consecutive.

    Each slice goes to the replica with the fewest bytes so far.
    Raises: LayoutError listing everything that the layout does not divide.
    """
    placement = Placement(bound, layout)
    writers = _Writers()
    plans = []
    for row in bound:
        # The embedding's row exports this tensor already.
        if row.row.copy_of_embedding:
            continue
        pieces: list[list[Piece]] = [[] for _ in row.hf]
        for holding in placement.holdings(row):
            rank = writers.pick(holding.ranks, prod(held_shape(row.row, holding.held)) * row.dtype.itemsize)
            for part, start, local_start, length, rows in held_segments(row.row, holding.held):
                pieces[part].append(Piece(rank, row.mcore, part, row.row.dim, start, length, local_start, rows))
        for name, shape, tiles, stored in zip(row.hf, row.row.shapes, pieces, exported_parts(row), strict=True):
            plans.append(TensorPlan(name, shape, row.dtype, row.group, tuple(tiles), stored))
    return plans


class _Writers:
    """Choice of the least loaded writer, with a heap of (bytes so far, rank) per set of replicas."""

    def __init__(self) -> None:
        self._heaps: dict[range, list[tuple[int, int]]] = {}

    def pick(self, replicas: range, num_bytes: int) -> int:
        if len(replicas) == 1:
            return replicas[0]
        heap = self._heaps.get(replicas)
        if heap is None:
            heap = self._heaps[replicas] = [(0, rank) for rank in replicas]
        # The lowest rank of equally loaded ones: every process computes the same plan.
        written, rank = heap[0]
        heapreplace(heap, (written + num_bytes, rank))
        return rank


def load_plan(bound: Sequence[BoundRow], layout: TrainLayout, rank: int) -> list[TensorLoad]:
    """Return the tensors of `rank`, each with its HF slices.

    Raises: LayoutError listing everything that the layout does not divide.
    """
    placement, at = Placement(bound, layout), layout.coordinates(rank)
    # A tensor can have several rows: multi-token prediction repeats embedding and head.
    rows_by_name: dict[str, list[tuple[BoundRow, ShardPart]]] = {}
    for row in bound:
        held = placement.part_at(row, at)
        if held is not None:
            rows_by_name.setdefault(row.mcore, []).append((row, held))
    return [_load(rank, rows) for rows in rows_by_name.values()]


def _load(rank: int, rows: Sequence[tuple[BoundRow, ShardPart]]) -> TensorLoad:
    """Plan one mcore tensor. If several rows share it, the first is read: a row precedes its copies (Row.repeats)."""
    row, held = rows[0]
    sources = tuple(
        (row.hf[part], Piece(rank, row.mcore, part, row.row.dim, start, length, local_start, held_rows))
        for part, start, local_start, length, held_rows in held_segments(row.row, held)
    )
    # All other HF names of this tensor must have equal values if the checkpoint contains them.
    named = (name for other, _ in rows for name in (*other.row.redundant, other.row.repeats, *other.hf))
    copies = tuple(name for name in named if name and name not in row.hf)
    return TensorLoad(row.mcore, held_shape(row.row, held), row, sources, copies)


def local_slice(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return the view of a rank's local mcore tensor that a piece covers."""
    return tensor.narrow(piece.dim, piece.local_start, piece.length) if tensor.dim() else tensor


def export_pieces(
    plan: Iterable[TensorPlan], tensors: Mapping[str, torch.Tensor], rank: int
) -> Iterator[tuple[TensorPlan, Piece, torch.Tensor]]:
    """Yield this rank's slices in HF layout, in the plan's order, as views of `tensors` without copies.

    `tensors` maps canonical names to local mcore tensors. A view keeps the dtype and device of its tensor; copy it into
    a buffer of the plan's dtype to convert it. A slice along dim 0 of a contiguous tensor is contiguous.
    Raises: ConversionError if a tensor is missing or its shape does not fit.
    """
    for tensor_plan in plan:
        for piece in tensor_plan.pieces:
            if piece.rank != rank:
                continue
            tensor = tensors.get(piece.mcore_name)
            if tensor is None:
                raise ConversionError(
                    f"rank {rank} has no {piece.mcore_name}, which the plan writes to {tensor_plan.hf_name}"
                )
            yield tensor_plan, piece, _fitting(tensor.detach(), tensor_plan, piece)


def _fitting(tensor: torch.Tensor, plan: TensorPlan, piece: Piece) -> torch.Tensor:
    wanted = plan.piece_shape(piece)
    fits = tensor.dim() == len(wanted)
    if fits and wanted:
        fits = piece.local_start + piece.length <= tensor.shape[piece.dim]
    view = local_slice(tensor, piece) if fits else tensor
    if tuple(view.shape) != wanted:
        raise ConversionError(
            f"rank {piece.rank}: {piece.mcore_name} {tuple(tensor.shape)} has no slice of shape {wanted} "
            f"from {piece.local_start} of dim {piece.dim} for {plan.hf_name}"
        )
    return view
