"""The trainer's side: each rank writes its own pieces of a bucket, converted, straight to their place.

Tensor-parallel shards of one HF tensor are written side by side by their ranks; nothing is gathered, and no piece is
stored anywhere between the parameter and the bucket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.plan import BucketEntry, BucketSpec
from mcore_rl.weights.transports.shared_memory import SharedBuckets
from model_converters.mapping.plan import Piece, TensorPlan, export_pieces


@dataclass(frozen=True)
class _Slice:
    """Rows of one piece that fall into one bucket: `target` in the bucket, `first:first + count` (of dim 0) in the
    piece."""

    target: torch.Tensor
    first: int
    count: int


class BucketWriter:
    """Writes one rank's share of the plan; it keeps no state between updates.

    Raises: WeightSyncError when the spec was not made of these plans.
    """

    def __init__(self, spec: BucketSpec, buckets: SharedBuckets, tensor_plans: Sequence[TensorPlan], rank: int) -> None:
        self._spec = spec
        self._rank = rank
        plans = {plan.hf_name: plan for plan in tensor_plans}
        planned = {entry.name for bucket in spec.buckets for entry in bucket}
        if planned != plans.keys():
            raise WeightSyncError(f"buckets and plan disagree about {sorted(planned ^ plans.keys())[:8]}")
        self._plans: list[list[TensorPlan]] = []
        self._slices: list[list[_Slice]] = []
        for index, bucket in enumerate(spec.buckets):
            own_plans: list[TensorPlan] = []
            slices: list[_Slice] = []
            for entry in bucket:
                plan = plans[entry.name]
                view = buckets.view(index, entry)
                cut = [(p, _cut(entry, p, view)) for p in plan.pieces if p.rank == rank]
                hit = [(piece, part) for piece, part in cut if part is not None]
                if hit:
                    own_plans.append(replace(plan, pieces=tuple(piece for piece, _ in hit)))
                    slices.extend(part for _, part in hit)
            self._plans.append(own_plans)
            self._slices.append(slices)

    def writes_to(self, index: int) -> bool:
        """Whether this rank has anything for bucket `index`."""
        return bool(self._slices[index])

    @torch.no_grad()
    def write(self, index: int, tensors: Mapping[str, torch.Tensor]) -> int:
        """Writes this rank's pieces of bucket `index`; returns their bytes. The slot must be free: every reader has
        acknowledged bucket index - num_slots.

        tensors: this rank's parameters by canonical mcore name.
        """
        written = 0
        sources = export_pieces(self._plans[index], tensors, self._rank)
        for slice_, (_, _, tensor) in zip(self._slices[index], sources, strict=True):
            source = tensor.narrow(0, slice_.first, slice_.count) if tensor.dim() else tensor
            slice_.target.copy_(source)
            written += slice_.target.nbytes
        return written


def _cut(entry: BucketEntry, piece: Piece, view: torch.Tensor) -> _Slice | None:
    """Where the part of `piece` that lies in the entry's rows goes; None when there is none.

    Shapes: view entry.chunk_shape.
    """
    if not entry.shape:
        return _Slice(view, 0, 1)
    if piece.dim:
        return _Slice(view.narrow(piece.dim, piece.start, piece.length), entry.first_row, entry.num_rows)
    first = max(piece.start, entry.first_row)
    end = min(piece.start + piece.length, entry.first_row + entry.num_rows)
    if first >= end:
        return None
    return _Slice(view.narrow(0, first - entry.first_row, end - first), first - piece.start, end - first)
