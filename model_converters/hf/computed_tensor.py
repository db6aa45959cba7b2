"""Tensors whose values are computed while they are read: dequantised FP8, INT4 and MXFP4 weights, weights with a LoRA
update, and parts of stacked experts that are not contiguous in the file.

Values are computed in float32 and rounded once, to the target's dtype, in tiles of a grid that is fixed to the whole
tensor. Temporaries therefore have the size of a tile, and every layout gets the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from model_converters.errors import ConversionError
from model_converters.hf.adapter_reader import LowRankUpdate, UpdateWindow
from model_converters.hf.int4 import WordWindow
from model_converters.hf.quant import TILE_COLUMNS, TILE_ROWS, Block, ScaleWindow
from model_converters.hf.shards import StoredTensor, TensorFiles
from model_converters.hf.stacked import RowReader, StackedPart


@dataclass(frozen=True)
class ComputedTensor:
    """A matrix in a file with the scales of its FP8 blocks or INT4 groups, a LoRA update, or both; or a vector or
    matrix in a tensor of stacked experts.

    packed: whether `weight` holds INT4 words; `block` is then (1, elements per scale).
    """

    name: str
    weight: StoredTensor | StackedPart
    scales: StoredTensor | None
    block: Block | None
    update: LowRankUpdate | None
    packed: bool = False

    def read_into(self, files: TensorFiles, out: torch.Tensor, *, row: int, column: int) -> None:
        """Fill `out` with the window of its shape that starts at element (row, column). A vector is one column.

        Raises: ConversionError if a file cannot be read or the scales are corrupt.
        """
        out = out.unsqueeze(1) if out.dim() == 1 else out
        fill_rows = self._row_reader(files)
        scales = self._scale_window(files, out, row, column)
        update = None if self.update is None else UpdateWindow(self.update, row, column, tuple(out.shape))
        # Only LoRA products depend on the grid. Without an update, use taller tiles for narrow windows.
        height = TILE_ROWS if update is not None else TILE_ROWS * max(1, TILE_COLUMNS // max(out.shape[1], 1))
        width = prod(self.weight.shape[1:])
        read = torch.empty(min(height, out.shape[0]), width, dtype=self.weight.dtype)
        buffer = torch.empty(height * min(TILE_COLUMNS, out.shape[1]))
        for rows in _bands(row, out.shape[0], height):
            # Read whole rows even for a few columns: one large read is faster than many small ones, and the pages
            # that the disk returns contain the other columns anyway.
            stored = read[: len(rows)]
            fill_rows(stored, rows.start)
            for columns in _bands(column, out.shape[1], TILE_COLUMNS):
                values = buffer[: len(rows) * len(columns)].view(len(rows), len(columns))
                part = stored[:, columns.start : columns.stop]
                if scales is None:
                    values.copy_(part)
                elif isinstance(scales, WordWindow):
                    scales.fill(stored, values, row=rows.start, column=columns.start)
                else:
                    scales.dequantise(part.contiguous(), values, row=rows.start, column=columns.start)
                if update is not None:
                    update.add_to(values, row=rows.start, column=columns.start)
                out[rows.start - row : rows.stop - row, columns.start - column : columns.stop - column] = values

    def _row_reader(self, files: TensorFiles) -> RowReader:
        if isinstance(self.weight, StackedPart):
            return self.weight.row_reader(files)
        weight = self.weight
        return lambda out, first: files.fill_rows(self.name, weight, out, first=first)

    def _scale_window(
        self, files: TensorFiles, out: torch.Tensor, row: int, column: int
    ) -> ScaleWindow | WordWindow | None:
        if self.scales is None or self.block is None:
            return None
        scales = files.read(self.name, self.scales)
        try:
            if self.packed:
                return WordWindow(scales, self.block, row=row, rows=out.shape[0])
            return ScaleWindow(scales, self.block, row=row, column=column, shape=tuple(out.shape))
        except ConversionError as error:
            raise ConversionError(f"{self.scales.file}: {self.name}: {error}") from None


def _bands(start: int, length: int, step: int) -> Iterator[range]:
    """Split [start, start + length) at the multiples of `step`."""
    position = start
    while position < start + length:
        end = min((position // step + 1) * step, start + length)
        yield range(position, end)
        position = end
