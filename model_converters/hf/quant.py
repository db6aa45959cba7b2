"""FP8 block quantisation in the format of DeepSeek-V3, Kimi-K2 and Qwen3-FP8 checkpoints.

`X.weight` is float8 e4m3 [M, N]. `X.weight_scale_inv` [ceil(M / block rows), ceil(N / block columns)] is, despite its
name, the factor to multiply with: value = fp8 * scale of its block. The product is computed in float32 and rounded
once, to the target's dtype, so the values of a slice do not depend on its borders.

Guarantees of a round trip FP8 -> bfloat16 -> FP8 (u = 2^-8 is the rounding unit of bfloat16; blocks with all values
below 1e-35 are excluded):
- quantise() depends only on the tensor and its recorded scales, so an export can be verified by quantising again.
- Tensors that quantise() wrote from bfloat16 get the same bytes, codes and scales: the largest code of a block is 448,
  and 448 * (amax / 448) rounds back to amax.
- Tensors of another writer get the same codes in blocks whose largest code is 448: value / scale changes by a factor
  of at most about 1 + 2u = 1 + 2^-7, but another code would need a change by 2^-5. The scale is recomputed from the
  rounded maximum and differs by at most u, so a value can change by one unit in the last place of bfloat16. This
  happens once; the next round trip is exact.
- Blocks whose largest code is below 448, for example with power-of-two scales (scale_fmt ue8m0), would be rescaled and
  rounded again. Conversions therefore record the scales of their source (dcp/source_record.py). A block that these
  scales represent exactly keeps them, so an unchanged block gets the same bytes, whoever wrote it.
"""

from __future__ import annotations

import torch

from model_converters.errors import ConversionError
from model_converters.mapping.transforms import Shape

Block = tuple[int, int]

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
EXPORT_BLOCK: Block = (128, 128)
"""Block size of all releases, and the only one that inference kernels support."""
SCALE_SUFFIX = "_scale_inv"
TILE_ROWS, TILE_COLUMNS = 64, 2048
"""Tile size of the computation, chosen so that intermediate values stay in the CPU cache."""

# Products of this scale and the largest code (448) stay below the maximum of float32, about 2^128, by a factor of 100.
# Real scales are far smaller.
_LARGEST_SCALE = 2.0**112
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_CODE_FACTOR = 2.0**8


def scale_shape(shape: Shape, block: Block) -> Shape:
    """Return the shape of the scales of a weight [M, N]."""
    return tuple(-(-size // length) for size, length in zip(shape, block, strict=True))


def quantise(
    tensor: torch.Tensor,
    block: Block = EXPORT_BLOCK,
    *,
    power_of_two: bool = False,
    scale_dtype: torch.dtype = torch.float32,
    original_scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a whole weight [M, N]. Returns (codes, scales).

    Works on one row of blocks at a time to keep temporaries small. scale = max |x| of the block / 448 (1 for a block of
    zeros), rounded up to a power of two with `power_of_two` (scale_fmt ue8m0). code = x / scale, rounded to the nearest
    e4m3. `original_scales` [block rows, block columns] are the scales of the release: a block that they represent
    without error keeps its original scale.

    Raises: ConversionError if the tensor is not a matrix or contains NaN or infinity.
    Source: DeepGEMM deep_gemm/utils/math.py per_block_cast_to_fp8 (use_ue8m0).
    """
    if tensor.dim() != 2:
        raise ConversionError(f"a tensor of shape {tuple(tensor.shape)} cannot be quantised in blocks")
    rows, columns = tensor.shape
    codes = torch.empty(rows, columns, dtype=FP8)
    scales = torch.ones(scale_shape((rows, columns), block))
    # The shape of the tensor differs from its shape in the release.
    if original_scales is not None and original_scales.shape != scales.shape:
        original_scales = None
    buffer, magnitudes = torch.empty(2, min(block[0], rows), columns)
    for index in range(scales.shape[0]):
        band = slice(index * block[0], (index + 1) * block[0])
        # The last block row may be shorter: the slice of `buffer` then has fewer rows.
        values = buffer[: rows - band.start].copy_(tensor[band])
        amax = column_block_maxima(torch.abs(values, out=magnitudes[: len(values)]), block[1])
        if not torch.isfinite(amax).all():
            raise ConversionError("a tensor with NaN or infinity cannot be quantised")
        scales[index] = scales_of_maxima(amax, power_of_two).to(scale_dtype)
        if original_scales is not None:
            exact = _represents(original_scales[index].float(), values, tensor[band], block[1])
            scales[index] = torch.where(exact, original_scales[index].float(), scales[index])
        values.div_(spread_scales(scales[index : index + 1], block[1], 0, columns))
        codes[band] = values.clamp_(-FP8_MAX, FP8_MAX)
    return codes, scales.to(scale_dtype)


def scales_of_maxima(amax: torch.Tensor, power_of_two: bool) -> torch.Tensor:
    """Return the scale of each block from its largest magnitude; 1 for a block of zeros. Shapes: same as `amax`."""
    # Divide by a tensor: CUDA multiplies by the reciprocal of a Python number, which can differ in the last bit.
    # Below the smallest normal number, amax / 448 would lose bits or underflow to 0.
    scales = (amax / torch.full_like(amax, FP8_MAX)).clamp_min(_SMALLEST_SCALE)
    if power_of_two:
        # frexp returns mantissas in [0.5, 1): a mantissa of exactly 0.5 is already a power of two.
        mantissas, exponents = torch.frexp(scales)
        exponents = exponents - (mantissas == 0.5).int()
        # The bits of 2^exponent. torch.ldexp multiplies by pow(2, exponent), which CUDA may round.
        scales = ((exponents + 127) << 23).view(torch.float32)
    return torch.where(amax > 0, scales, 1.0)


def _represents(scales: torch.Tensor, values: torch.Tensor, tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Return for each block of one block row whether its values are exactly representable with the given scales.

    Shapes: scales [block columns]; values (float32) and tensor [rows, N] -> bool [block columns].
    """
    spread = spread_scales(scales[None], width, 0, values.shape[1])
    codes = (values / spread).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
    wrong = (codes.float().mul_(spread).to(tensor.dtype) != tensor).float()
    return column_block_maxima(wrong, width) == 0


def column_block_maxima(magnitudes: torch.Tensor, width: int, column: int = 0) -> torch.Tensor:
    """Return the maximum of each block in one block row. The first column is number `column` of its block.

    Shapes: [rows, N] -> [blocks that the columns touch].
    """
    # Reduce rows first, then groups of `width` columns. Zeros complete the outer groups and do not change their maxima.
    columns = magnitudes.amax(dim=0)
    padded = torch.nn.functional.pad(columns, (column, -(column + len(columns)) % width))
    return padded.view(-1, width).amax(dim=1)


class ScaleWindow:
    """Scales of a window of a weight, expanded to one float32 per block row and element column.

    `scales` belong to the whole weight; the window has the given shape and starts at element (row, column).
    Raises: ConversionError if a scale is NaN, infinite or above 2^112.
    """

    def __init__(self, scales: torch.Tensor, block: Block, *, row: int, column: int, shape: Shape) -> None:
        self._block_rows, width = block
        self._first, self._column = row // self._block_rows, column
        needed = scales[self._first : -(-(row + shape[0]) // self._block_rows)].float()
        if not (needed.abs() <= _LARGEST_SCALE).all():
            raise ConversionError("its scales contain NaN, infinity or absurdly large values; the file is corrupt")
        self._spread = spread_scales(needed, width, column, shape[1]).mul_(_CODE_FACTOR)

    def dequantise(self, codes: torch.Tensor, out: torch.Tensor, *, row: int, column: int) -> None:
        """Fill float32 `out` with the values of `codes`: part of the window, starting at element (row, column)."""
        # Multiply row by row of blocks; `_spread` already contains the factor 2^8 that the conversion has divided by.
        _to_scaled_float32(codes, out)
        columns = slice(column - self._column, column - self._column + codes.shape[1])
        done = 0
        while done < len(codes):
            band, inside = divmod(row + done, self._block_rows)
            length = min(self._block_rows - inside, len(codes) - done)
            out[done : done + length].mul_(self._spread[band - self._first, columns])
            done += length


def spread_scales(scales: torch.Tensor, width: int, column: int, num_columns: int) -> torch.Tensor:
    """Expand scales to columns [column, column + num_columns).

    Shapes: [block rows, block columns] -> [block rows, num_columns].
    """
    blocks = torch.arange(column, column + num_columns, device=scales.device).div_(width, rounding_mode="floor")
    return scales.index_select(1, blocks)


def _to_scaled_float32(codes: torch.Tensor, out: torch.Tensor) -> None:
    """Convert FP8 codes to exact float32 values, divided by 2^8.

    torch converts float8 one element at a time. The bits s eeee mmm, placed in a float16 as s 0eeee mmm0000000, are the
    same number / 2^8, subnormals included. The integer operations and the conversion from float16 are vectorised, which
    is five times as fast (measured). Only NaN has no such encoding.
    """
    signed = codes.view(torch.int8)
    if codes.numel() and (int(signed.max()) == 0x7F or int(codes.view(torch.uint8).max()) == 0xFF):
        out.copy_(codes).div_(_CODE_FACTOR)
        return
    # Clear bit 14, the highest exponent bit, which the sign extension has set for negative codes.
    half = signed.to(torch.int16).mul_(2**7).bitwise_and_(~(1 << 14))
    out.copy_(half.view(torch.float16))
