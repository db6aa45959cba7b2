"""Conversion of fused attention and expert weights in preallocated memory, in both directions, compared with memcpy."""

from __future__ import annotations

import torch

from benchmarks.pairs import Pair, pair_row
from benchmarks.result import Result
from benchmarks.sizes import size
from model_converters.mapping.placement import segments_of
from model_converters.mapping.table import Row
from model_converters.mapping.transforms import GateUp, GroupedQKV, Shape

HEAD_DIM = 128
GROUPS = 4
# (hidden size, query heads) and (hidden size, inner size) whose fused bfloat16 tensors have about 20 and 75 MB.
QKV_SIZES = size({20: (2048, 32), 75: (4096, 64)}, {1: (256, 8)})
EXPERT_SIZES = size({20: (2048, 2560), 75: (4096, 4608)}, {1: (256, 256)})


def run() -> list[Result]:
    torch.set_num_threads(1)
    results = []
    for megabytes in QKV_SIZES:
        for kind in ("QKV", "expert"):
            for direction in ("to mcore", "to HF"):
                results.append(pair_row(f"{kind} {direction}", ">= 0.9", transform_pair, kind, direction, megabytes))
    return results


def fused_row(kind: str, megabytes: int) -> Row:
    """Return the row of a whole attention projection, or of the gate and up projections of an expert."""
    if kind == "QKV":
        hidden, heads = QKV_SIZES[megabytes]
        lengths = [heads * HEAD_DIM, GROUPS * HEAD_DIM, GROUPS * HEAD_DIM]
        shapes: tuple[Shape, ...] = tuple((length, hidden) for length in lengths)
        return Row(mcore="qkv", hf=("q", "k", "v"), shapes=shapes, transform=GroupedQKV(GROUPS))
    hidden, inner = EXPERT_SIZES[megabytes]
    return Row(mcore="fc1", hf=("gate", "up"), shapes=((inner, hidden),) * 2, transform=GateUp())


def transform_pair(kind: str, direction: str, megabytes: int) -> Pair:
    """Compare copying all segments of the row one by one with one copy of as many bytes. The views of the segments are
    created once, like a sync plan, because the buffers stay the same."""
    row = fused_row(kind, megabytes)
    parts = [torch.ones(shape, dtype=torch.bfloat16) for shape in row.shapes]
    fused = torch.cat(parts)
    # The limit copies the same bytes in one piece.
    source, target = fused.clone(), torch.zeros_like(fused)

    copies = []
    for part, start, local_start, length in segments_of(row, 0, 1):
        ends = fused.narrow(0, local_start, length), parts[part].narrow(0, start, length)
        copies.append(ends if direction == "to mcore" else ends[::-1])

    def ours() -> None:
        for to, from_ in copies:
            to.copy_(from_)

    return Pair(ours, lambda: target.copy_(source), fused.nbytes)
