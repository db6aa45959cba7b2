"""Form in which weights travel in a sync (rollout.quantization), and FP8 codes and scales of slices.

int4.py describes INT4. In FP8, in the format of hf/quant.py, a quantised HF tensor `X.weight` travels as two tensors:
`X.weight`, the codes (float8 e4m3), and `X.weight_scale_inv`, one float32 scale per block of 128 x 128 elements. A
slice need not begin and end at blocks: it carries the codes of its elements and the scales of the blocks whose first
element it contains, so every scale travels once.

Trainer ranks quantise the values that they would send without quantisation, in the dtype of the sync. Codes and scales
therefore do not depend on the dtype and the layout of the trainer's parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from mcore_rl.config.quantization import BLOCK, INT4, UNQUANTIZED
from mcore_rl.config.quantization import FP8 as FP8_BLOCKS
from mcore_rl.errors import WeightSyncError
from mcore_rl.weights import int4
from model_converters.errors import LayoutError
from model_converters.hf.quant import (
    FP8,
    FP8_MAX,
    SCALE_SUFFIX,
    column_block_maxima,
    scales_of_maxima,
    spread_scales,
)
from model_converters.mapping.transforms import Shape

SCALE_DTYPE = torch.float32


class TensorBox(NamedTuple):
    """Box of an HF tensor as it travels: indices of its first element, its shape, and its dtype."""

    hf_name: str
    first: Shape
    shape: Shape
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Encoding:
    """Form in which a tensor travels: values of `dtype`, or codes and scales computed from values of `dtype`.

    quantization: value of rollout.quantization for this tensor. group: rollout.quantization_group.
    """

    dtype: torch.dtype
    quantization: str = UNQUANTIZED
    group: int = 0

    @property
    def quantised(self) -> bool:
        return self.quantization != UNQUANTIZED

    @property
    def step(self) -> int:
        """Indices that a cut of the plan must not separate."""
        return {FP8_BLOCKS: BLOCK, INT4: self.group}.get(self.quantization, 1)

    def boxes(self, hf_name: str, first: Shape, shape: Shape) -> tuple[TensorBox, ...]:
        """Return the boxes that carry a box of an HF tensor: its values, or its codes and scales (if it has any)."""
        if not self.quantised:
            return (TensorBox(hf_name, first, shape, self.dtype),)
        if self.quantization == INT4:
            return self._words_and_scales(hf_name, first, shape)
        codes = TensorBox(hf_name, first, shape, FP8)
        # The first block that begins in the box, and the first one after it.
        begins = tuple(-(-start // BLOCK) for start in first)
        ends = (-(-(start + length) // BLOCK) for start, length in zip(first, shape, strict=True))
        counts = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        return (codes, TensorBox(hf_name + SCALE_SUFFIX, begins, counts, SCALE_DTYPE)) if prod(counts) else (codes,)

    def _words_and_scales(self, hf_name: str, first: Shape, shape: Shape) -> tuple[TensorBox, ...]:
        """Raises: LayoutError for a box that divides a group."""
        (row, column), (rows, columns) = first, shape
        if column % self.group or columns % self.group:
            raise LayoutError(
                f"{hf_name or 'a matrix of experts'}: columns {column} to {column + columns} are not whole groups of "
                f"{self.group} (rollout.quantization_group)"
            )
        return tuple(
            TensorBox(hf_name + suffix, (row, column // each), (rows, columns // each), dtype)
            for suffix, each, dtype in (
                (int4.PACKED_SUFFIX, int4.CODES_PER_WORD, int4.WORD_DTYPE),
                (int4.SCALE_SUFFIX, self.group, int4.SCALE_DTYPE),
            )
        )

    def num_bytes(self, first: Shape, shape: Shape) -> int:
        """Return the bytes of a box of a tensor."""
        return sum(box.num_bytes for box in self.boxes("", first, shape))


def block_range(start: int, length: int) -> range:
    """Return the blocks that `length` indices from `start` touch."""
    return range(start // BLOCK, -(-(start + length) // BLOCK))


def _bands(start: int, length: int) -> Iterator[tuple[int, slice]]:
    """Cut `length` indices from `start` at the borders of blocks. Yields (block, indices relative to `start`)."""
    for block in block_range(start, length):
        yield block, slice(max(block * BLOCK - start, 0), min((block + 1) * BLOCK - start, length))


def block_maxima(values: torch.Tensor, first: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Return the largest magnitude of each block that a box of a matrix touches.

    values: [rows, columns], from element `first` of the matrix on; rounded to `dtype` before.
    Shapes: float32 [block rows, block columns]. NaN in a block gives NaN.
    """
    return torch.stack([
        column_block_maxima(values[band].to(dtype).float().abs(), BLOCK, first[1] % BLOCK)
        for _, band in _bands(first[0], len(values))
    ])  # fmt: skip


def quantise_box(
    values: torch.Tensor,
    places: tuple[torch.Tensor, ...],
    box: TensorBox,
    dtype: torch.dtype,
    *,
    maxima: torch.Tensor | None,
    power_of_two: bool,
) -> None:
    """Write the codes and scales of a box of a matrix. Works on one row of blocks at a time.

    values: [rows, columns]; rounded to `dtype` before. places: as in Encoding.boxes. box: the box of the codes.
    maxima: largest magnitudes of all blocks of the matrix that slices divide, 0 for others; on the device of `values`.
    Raises: WeightSyncError naming a tensor with NaN or infinity.
    """
    codes, column = places[0], box.first[1]
    buffer, magnitudes = torch.empty(2, min(BLOCK, len(values)), values.shape[1], device=values.device)
    found = []
    for block, band in _bands(box.first[0], len(values)):
        part = buffer[: band.stop - band.start].copy_(values[band].to(dtype))
        amax = column_block_maxima(torch.abs(part, out=magnitudes[: len(part)]), BLOCK, column % BLOCK)
        if maxima is not None:
            amax = torch.maximum(amax, maxima[block, column // BLOCK : column // BLOCK + len(amax)])
        scales = scales_of_maxima(amax, power_of_two)
        part.div_(spread_scales(scales[None], BLOCK, column % BLOCK, part.shape[1]))
        codes[band].copy_(part.clamp_(-FP8_MAX, FP8_MAX))
        found.append(torch.stack((amax, scales)))
    amax, scales = torch.stack(found, dim=1)
    if not torch.isfinite(amax).all():
        raise WeightSyncError(
            f"{box.hf_name} contains NaN or infinity, which rollout.quantization={FP8_BLOCKS} cannot represent"
        )
    # Blocks that began before this box belong to another box.
    for place in places[1:]:
        place.copy_(scales[-place.shape[0] :, -place.shape[1] :])
