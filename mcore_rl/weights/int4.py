"""INT4 weights of experts (rollout.quantization=int4), in the format pack-quantized of compressed-tensors.

A quantised HF tensor `X.weight` [rows, columns] travels as two tensors:

    X.weight_packed   int32 [rows, columns / 8]: 8 codes per word, the first in the lowest bits, each code + 8
    X.weight_scale    bfloat16 [rows, columns / group]: one scale per group of neighbouring elements of a row

value = code * scale; scale = largest magnitude of the group / 7; codes are at most 7 and at least -7. Rows are
independent and groups are never divided, so words and scales do not depend on the layout of trainer and engine. The
format's third tensor, `X.weight_shape`, is not sent: no kernel of vLLM 0.32 reads it.
"""

from __future__ import annotations

import torch

from mcore_rl.config.quantization import INT4
from mcore_rl.errors import WeightSyncError

PACKED_SUFFIX = "_packed"
SCALE_SUFFIX = "_scale"
"""Suffixes of the name of the quantised HF tensor."""
CODES_PER_WORD = 8
WORD_DTYPE, SCALE_DTYPE = torch.int32, torch.bfloat16
CODE_MAX = 7
_OFFSET = 8
"""Added to a code, so that it is not negative."""
_SMALLEST_SCALE = torch.finfo(torch.bfloat16).smallest_normal
_BAND_ROWS = 256
"""Rows that are quantised at a time, which bounds the extra memory."""


def codes_and_scales(values: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix in groups of `group` elements of a row. NaN or infinity in a group makes its codes undefined.

    Computed in float32, with the scale rounded to bfloat16. The scale of a group of zeros is 1.
    Shapes: values [rows, columns] -> codes float32 [rows, groups, group], scales bfloat16 [rows, groups].
    """
    groups = values.float().unflatten(1, (-1, group))
    amax = groups.abs().amax(dim=-1)
    # Divide by a tensor: CUDA multiplies by the reciprocal of a Python number, which can differ in the last bit.
    scales = (amax / torch.full_like(amax, CODE_MAX)).clamp_min(_SMALLEST_SCALE)
    scales = torch.where(amax == 0, 1.0, scales).to(SCALE_DTYPE)
    codes = (groups / scales.float()[..., None]).round_().clamp_(-_OFFSET, CODE_MAX)
    codes += 0  # -0.0 has the code of 0.0
    return codes, scales


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes into words. Shapes: [rows, groups, group] -> int32 [rows, groups * group / 8]."""
    nibbles = (codes.flatten(1) + _OFFSET).to(torch.uint8)
    return (nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)).view(WORD_DTYPE)


def dequantised(words: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values that words and scales represent: code * scale, rounded to `dtype`.

    Shapes: words int32 [rows, columns / 8], scales [rows, groups] -> [rows, columns].
    """
    pairs = words.contiguous().view(torch.uint8)
    codes = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1).float() - _OFFSET
    return (codes.unflatten(1, (scales.shape[1], -1)) * scales.float()[..., None]).flatten(1).to(dtype)


def rounded(values: torch.Tensor, group: int) -> torch.Tensor:
    """Return the values of a matrix after quantisation: `dequantised` of its words and scales, in the same dtype.

    Values are rounded to bfloat16 before, as in a weight sync.
    Shapes: [rows, columns], unchanged.
    """
    codes, scales = codes_and_scales(values.to(SCALE_DTYPE), group)
    return codes.mul_(scales.float()[..., None]).flatten(1).to(SCALE_DTYPE).to(values.dtype)


def quantise_into(
    values: torch.Tensor, places: tuple[torch.Tensor, ...], *, hf_name: str, dtype: torch.dtype, group: int
) -> None:
    """Write words and scales of a box of a matrix.

    values: [rows, columns]; rounded to `dtype` before. places: words and scales. hf_name: name for errors.
    Raises: WeightSyncError naming a tensor with NaN or infinity.
    """
    are_finite = []
    for first in range(0, len(values), _BAND_ROWS):
        band = slice(first, first + _BAND_ROWS)
        part = values[band].to(dtype)
        are_finite.append(torch.isfinite(part).all())
        codes, scales = codes_and_scales(part, group)
        places[0][band].copy_(packed(codes))
        places[1][band].copy_(scales)
    if not torch.stack(are_finite).all():
        raise WeightSyncError(f"{hf_name} contains NaN or infinity, which rollout.quantization={INT4} cannot represent")
