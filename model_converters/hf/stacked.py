"""Checkpoints that store all experts of a layer in one tensor, read as the table's tensors of single experts.

| written by | `mlp.experts.gate_up_proj` | `mlp.experts.down_proj` |
|---|---|---|
| save_pretrained(save_original_format=False), transformers 5 | [E, 2 I, h]: gate, then up | [E, h, I] |
| the hub's Qwen3-VL-MoE | [E, h, 2 I]: gate, then up | [E, I, h] |
| gpt-oss in bfloat16 | [E, h, 2 I]: gate and up alternate | [E, I, h] |
| gpt-oss in MXFP4, `_blocks` and `_scales` | [E, 2 I, h]: gate and up alternate | [E, h, I] |

E experts with I units and hidden size h. The table declares these tensors (Row.stored), and the index of a checkpoint
decides, layer by layer: config.json does not show how experts are stored. Qwen3-VL-MoE exists in two
orientations, which the shapes show.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch

from model_converters.errors import ConversionError, listing
from model_converters.hf.mxfp4 import BLOCK, BLOCK_BYTES, dequantise
from model_converters.hf.shards import StoredTensor, TensorFiles
from model_converters.mapping.table import BoundRow, StoredPart, stored_parts
from model_converters.mapping.transforms import Shape

# Tensors of single experts have a number here.
_STACKED = re.compile(r"\.experts\.(?!\d)")


def has_stacked_experts(names: Iterable[str]) -> bool:
    """Return whether some tensors contain all experts of a layer."""
    return any(_STACKED.search(name) for name in names)


RowReader = Callable[[torch.Tensor, int], None]
"""Function that fills a tensor [n, columns] with the rows of a part from a given one on."""


@dataclass(frozen=True)
class StackedPart:
    """A part of stacked experts whose values are not contiguous in the file: transposed, of every second row, or MXFP4.

    matrix: location of the expert's matrix, or of its MXFP4 codes with the exponents `scales`.
    """

    part: StoredPart
    matrix: StoredTensor
    scales: StoredTensor | None = None

    @property
    def file(self) -> Path:
        return self.matrix.file

    @property
    def offset(self) -> int:
        return self.matrix.offset

    @property
    def shape(self) -> Shape:
        return self.part.part_shape

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.scales is not None else self.matrix.dtype

    def row_reader(self, files: TensorFiles) -> RowReader:
        """Map the matrix and return the reader of its rows. A vector has one column."""
        place, length = self.part.place, self.shape[0]
        if self.scales is None:
            rows = rows_of(files.mapped(self.matrix), self.part)
            return lambda out, first: _copy_rows(rows, out, first)
        codes, exponents = (
            files.mapped(stored)[place.start :: place.step][:length] for stored in (self.matrix, self.scales)
        )
        return lambda out, first: dequantise(codes[first : first + len(out)], exponents[first : first + len(out)], out)


def rows_of(matrix: torch.Tensor, part: StoredPart) -> torch.Tensor:
    """Return the view of a part in the stored matrix of its expert."""
    rows = matrix.T if part.place.transposed else matrix
    return rows[part.place.start :: part.place.step][: part.part_shape[0]]


def _copy_rows(rows: torch.Tensor, out: torch.Tensor, first: int) -> None:
    out.copy_(rows[first : first + len(out)].reshape(out.shape))


def unstack(
    listed: Mapping[str, StoredTensor], bound: Sequence[BoundRow]
) -> tuple[dict[str, StoredTensor], dict[str, StackedPart]]:
    """Replace each stacked tensor that the rows declare by its parts.

    Returns: the tensors that are contiguous in a file, and the other ones.

    Raises: ConversionError naming tensors of another shape or without scales, and parts that the checkpoint also
    contains under their own name or twice.
    """
    every = [part for row in bound for part in stored_parts(row)]
    plain = [oriented(part, listed[part.name].shape) for part in every if part.name in listed]
    packed = [part for part in every if part.place.mxfp4 and f"{part.name}{BLOCKS}" in listed]
    wanted = {part.name: part.shape for part in plain}
    for part in packed:
        wanted |= _packed_shapes(part)
    parts = [*(part.part for part in plain), *(part.part for part in packed)]
    twice = [name for name, count in Counter([*parts, *listed]).items() if count > 1]
    problems = [f"{name} is stored twice" for name in twice]
    for name, shape in wanted.items():
        if name not in listed:
            problems.append(f"{name} is missing")
        elif listed[name].shape != shape:
            problems.append(f"{name} is {listed[name].shape} instead of {shape}")
    if problems:
        raise ConversionError(f"experts stored as one tensor per layer: {listing(problems)}")
    tensors = {name: stored for name, stored in listed.items() if name not in wanted}
    scattered = {part.part: StackedPart(part, *_packed_matrices(listed, part)) for part in packed}
    for part in plain:
        matrix = matrix_of(listed[part.name], part)
        if part.place.step == 1 and not part.place.transposed:
            tensors[part.part] = _range(matrix, part)
        else:
            scattered[part.part] = StackedPart(part, matrix)
    return tensors, scattered


def oriented(part: StoredPart, found: Shape) -> StoredPart:
    """Return the part in the orientation of the stored tensor, whose shape is `found`.

    Raises: ConversionError for square matrices whose orientation the shape cannot show.
    """
    if not part.place.either_way:
        return part
    *outer, rows, columns = part.shape
    if rows == columns:
        raise ConversionError(
            f"experts stored as one tensor per layer: {part.name} has square matrices, of which files exist in two "
            "orientations; store single experts, under names such as "
            f"{part.part}"
        )
    other = (*outer, columns, rows)
    if found != other:
        return part
    return replace(part, shape=other, place=replace(part.place, transposed=not part.place.transposed))


def matrix_of(stored: StoredTensor, part: StoredPart) -> StoredTensor:
    """Return the location of the matrix of the part's expert in the stacked tensor `stored`."""
    if part.expert is None:
        return stored
    num_bytes = stored.num_bytes // stored.shape[0]
    return stored._replace(shape=stored.shape[1:], offset=stored.offset + part.expert * num_bytes, num_bytes=num_bytes)


def _range(matrix: StoredTensor, part: StoredPart) -> StoredTensor:
    """Return the location of a part with contiguous rows."""
    row_bytes = prod(part.part_shape[1:]) * matrix.dtype.itemsize
    first, num_bytes = part.place.start * row_bytes, part.part_shape[0] * row_bytes
    return matrix._replace(shape=part.part_shape, offset=matrix.offset + first, num_bytes=num_bytes)


BLOCKS, SCALES = "_blocks", "_scales"
"""Suffixes of MXFP4 codes and exponents."""


def _packed_shapes(part: StoredPart) -> dict[str, Shape]:
    """Return the names and shapes of the MXFP4 tensors that contain a part."""
    exponents = (*part.shape[:1], part.place.rows, part.part_shape[1] // BLOCK)
    return {f"{part.name}{BLOCKS}": (*exponents, BLOCK_BYTES), f"{part.name}{SCALES}": exponents}


def _packed_matrices(listed: Mapping[str, StoredTensor], part: StoredPart) -> tuple[StoredTensor, StoredTensor]:
    codes, exponents = (matrix_of(listed[f"{part.name}{suffix}"], part) for suffix in (BLOCKS, SCALES))
    return codes, exponents
