"""Slices of stacked experts, as engines load them, converted to slices of the tensors of single experts.

Releases of some families store all experts of a layer in one tensor, and the engines' loaders expect this tensor
(Row.stacked_release). Updates contain the tensors of single experts. A part has every step-th row of an expert's
matrix, so the memory of a stacked slice is described by offset and strides of its parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from mcore_rl.engines.kept_slices import KeptSlice
from mcore_rl.weights.slices.shard_map import ShardMap
from model_converters.mapping.table import BoundRow, StoredPart, exported_parts


def loaded_tensors(shard_map: ShardMap) -> dict[str, torch.Tensor]:
    """Return a meta tensor for each tensor that an engine loads: HF tensors, with stacked ones in place of their
    parts."""
    stacked = {part.part: part for part in _parts(shard_map.rows)}
    loaded = {}
    for box in shard_map.tensors():
        part = stacked.get(box.hf_name)
        name, shape = (box.hf_name, box.shape) if part is None else (part.name, part.shape)
        loaded[name] = torch.empty(shape, dtype=box.dtype, device="meta")
    return loaded


def unstacked(kept: Iterable[KeptSlice], rows: Iterable[BoundRow]) -> list[KeptSlice]:
    """Replace slices of stacked tensors by slices of their parts."""
    parts: dict[str, list[StoredPart]] = {}
    for part in _parts(rows):
        parts.setdefault(part.name, []).append(part)
    found = []
    for each in kept:
        if each.name not in parts:
            found.append(each)
            continue
        slices = (_slice_of(each, part) for part in parts[each.name])
        found += [inner for inner in slices if inner is not None]
    return found


def _parts(rows: Iterable[BoundRow]) -> Sequence[StoredPart]:
    return [part for row in rows for part in exported_parts(row) if part is not None]


def _slice_of(kept: KeptSlice, part: StoredPart) -> KeptSlice | None:
    """Return the elements of a part in a slice of the stacked tensor; None if there are none."""
    start, size, strides, offset = kept.start, kept.size, kept.strides, kept.offset
    if part.expert is not None:
        if not start[0] <= part.expert < start[0] + size[0]:
            return None
        offset += (part.expert - start[0]) * strides[0]
        start, size, strides = start[1:], size[1:], strides[1:]
    if part.place.transposed:
        start, size, strides = start[::-1], size[::-1], strides[::-1]
    step = part.place.step
    # Row i of the part is row place.start + step * i of the matrix.
    first = max(0, -(-(start[0] - part.place.start) // step))
    end = min(part.part_shape[0], -(-(start[0] + size[0] - part.place.start) // step))
    if first >= end:
        return None
    offset += (part.place.start + step * first - start[0]) * strides[0]
    return KeptSlice(
        part.part,
        (first, *start[1:]),
        (end - first, *size[1:]),
        kept.module,
        kept.parameter,
        offset,
        (step * strides[0], *strides[1:]),
    )
