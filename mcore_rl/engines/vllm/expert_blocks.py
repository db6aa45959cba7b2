"""Block layout of experts in FlashInfer's TRTLLM kernels, which vLLM 0.32 selects on Blackwell GPUs.

vLLM reorders each expert's bfloat16 matrix in place: blocks of 64 columns follow each other, each with all rows in an
order that FlashInfer computes. That order is found by converting row numbers with vLLM's own function.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from vllm.model_executor.layers.quantization.utils.flashinfer_utils import (
    convert_moe_weights_to_flashinfer_trtllm_block_layout,
)

from mcore_rl.errors import WeightSyncError

BLOCK_COLUMNS = 64
"""Columns of a block: 128 bytes."""
_LARGEST = 1 << 15
"""Largest number of rows or columns: their numbers are the bit patterns of bfloat16 elements."""

Shape = tuple[int, int]


@lru_cache(maxsize=8)
def block_rows(gate_up: Shape, down: Shape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row in the checkpoint of each row of a block: first for gate and up together, then for down.

    Shapes: (rows, columns) of the two matrices -> int64 [rows] each.
    Raises: WeightSyncError if FlashInfer's layout differs from vLLM 0.32's.
    """
    shapes = (gate_up, down)
    if max(*gate_up, *down) > _LARGEST:
        raise WeightSyncError(f"experts of {gate_up} and {down}: only {_LARGEST} rows and columns can be read back")
    rows = _converted([torch.arange(each[0], device=device)[:, None].expand(each) for each in shapes])
    columns = _converted([torch.arange(each[1], device=device).expand(each) for each in shapes])
    found = []
    for shape, row_numbers, column_numbers in zip(shapes, rows, columns, strict=True):
        order = row_numbers[0, :, 0].long()
        expected = torch.arange(shape[1], device=device).view(-1, 1, BLOCK_COLUMNS)
        is_blocked = (row_numbers == row_numbers[:1, :, :1]).all() and (column_numbers == expected).all()
        if not is_blocked or not order.sort().values.equal(torch.arange(shape[0], device=device)):
            raise WeightSyncError(f"experts of {shape}: FlashInfer's blocks have another layout than in vLLM 0.32")
        found.append(order)
    return found[0], found[1]


def from_blocks(matrix: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Convert one expert's matrix to the checkpoint's rows and columns.

    rows: result of block_rows.
    Shapes: [rows, columns] in blocks -> [rows, columns].
    """
    return torch.empty_like(matrix).index_copy_(0, rows, _blocks(matrix).transpose(0, 1).reshape(matrix.shape))


def _converted(numbers: list[torch.Tensor]) -> list[torch.Tensor]:
    """Convert matrices of numbers to blocks. Shapes: [rows, columns] -> int16 [blocks, rows, BLOCK_COLUMNS]."""
    gate_up, down = (each.to(torch.int16)[None].contiguous() for each in numbers)
    # In place, and byte by byte: no pattern of bits is changed.
    convert_moe_weights_to_flashinfer_trtllm_block_layout({}, gate_up.view(torch.bfloat16), down.view(torch.bfloat16))
    return [_blocks(gate_up[0]), _blocks(down[0])]


def _blocks(matrix: torch.Tensor) -> torch.Tensor:
    rows, columns = matrix.shape
    return matrix.view(columns // BLOCK_COLUMNS, rows, BLOCK_COLUMNS)
