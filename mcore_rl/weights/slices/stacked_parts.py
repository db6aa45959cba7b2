"""Slices of stacked experts, as engines load them, as slices of the tensors of single experts.

Releases of some families store all experts of a layer in one tensor, and the engines' loaders expect this tensor
(Row.stacked_release). Updates contain the tensors of single experts. A part has every step-th row of an expert's
matrix, so the memory of a stacked slice is described by offset and strides of its parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from mcore_rl.weights.slices.shard_map import ShardMap
from model_converters.mapping.table import BoundRow, StoredPart, exported_parts
from model_converters.mapping.transforms import Shape


class StridedSlice(NamedTuple):
    """Box of a tensor, and its place in a parameter: element `index` is at `offset + sum(index * strides)`."""

    name: str
    start: Shape
    size: Shape
    strides: Shape
    offset: int


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


class StackedParts:
    """Parts of the stacked tensors that engines load, by the names of these tensors."""

    def __init__(self, rows: Iterable[BoundRow]) -> None:
        self._parts: dict[str, list[StoredPart]] = {}
        for part in _parts(rows):
            self._parts.setdefault(part.name, []).append(part)

    def slices(self, whole: StridedSlice) -> Iterator[StridedSlice]:
        """Yield the slice of every part in the slice `whole` of a tensor; `whole` itself if the tensor has no parts."""
        if whole.name not in self._parts:
            yield whole
        for part in self._parts.get(whole.name, ()):
            found = _slice_of(whole, part)
            if found is not None:
                yield found


def _parts(rows: Iterable[BoundRow]) -> Iterator[StoredPart]:
    return (part for row in rows for part in exported_parts(row) if part is not None)


def _slice_of(whole: StridedSlice, part: StoredPart) -> StridedSlice | None:
    """Return the elements of a part in a slice of the stacked tensor; None if there are none."""
    _, start, size, strides, offset = whole
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
    inner = (first, *start[1:]), (end - first, *size[1:]), (step * strides[0], *strides[1:])
    return StridedSlice(part.part, *inner, offset)
