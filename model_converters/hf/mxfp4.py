"""MXFP4 values: 4-bit codes (E2M1) in blocks of 32 with one power of two per block.

A byte has two codes, the first one in its low bits. value = code * 2^(exponent - 127). All values are exact in
bfloat16, except those above its range, which are infinite.
Source: OCP Microscaling Formats (MX) 1.0; transformers integrations/mxfp4.py, convert_moe_packed_tensors.
"""

from __future__ import annotations

import torch

BLOCK = 32
"""Values per block."""
BLOCK_BYTES = BLOCK // 2
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Twice the codes: 2^128, for an exponent of 255, is no float32.
_CODES = 2 * torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)])
_PAIRS = torch.stack([_CODES.repeat(16), _CODES.repeat_interleave(16)], dim=1)
"""Twice the two codes of every byte [256, 2]."""
_HALF_SCALES = torch.tensor([2.0 ** (exponent - 128) for exponent in range(256)])


def dequantise(codes: torch.Tensor, exponents: torch.Tensor, out: torch.Tensor) -> None:
    """Fill `out` with the values of some rows, rounded once to its dtype.

    Shapes: codes uint8 [rows, blocks, 16], exponents uint8 [rows, blocks], out [rows, 32 blocks].
    """
    values = _PAIRS[codes.int()].flatten(2)
    values *= _HALF_SCALES[exponents.int()].unsqueeze(-1)
    out.copy_(values.flatten(1))
