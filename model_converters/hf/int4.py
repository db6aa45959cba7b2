"""INT4 weights of compressed-tensors releases (format pack-quantized), such as Kimi-K2-Thinking, as values.

| tensor of the release | content |
|---|---|
| `X.weight_packed` | int32 [rows, columns / 8]: 8 codes per word, the first in the lowest bits, each code + 8 |
| `X.weight_scale` | [rows, columns / group]: one scale per group of neighbouring elements of a row |
| `X.weight_shape` | [2]: rows and columns; not read, because the other two tensors determine them |

value = code * scale. A code has 4 bits, so the float32 product is exact; it is rounded once, to the target's dtype.
compressed-tensors multiplies in the dtype of the scales, which gives the same bits in that dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from model_converters.errors import ConversionError
from model_converters.hf.quant import Block, spread_scales
from model_converters.hf.shards import StoredTensor

PACKED_SUFFIX, SCALE_SUFFIX, SHAPE_SUFFIX = "_packed", "_scale", "_shape"
"""Suffixes of a weight's name."""
CODES_PER_WORD = 8
_OFFSET = 8


class PackedWeight(NamedTuple):
    """Location of an INT4 weight: words [rows, columns / 8] and scales [rows, columns / group]."""

    words: StoredTensor
    scales: StoredTensor

    @property
    def values(self) -> StoredTensor:
        """The weight that the words describe: its dtype and shape are the values', its place in the file the words'."""
        rows, words = self.words.shape
        return self.words._replace(dtype=self.scales.dtype, shape=(rows, words * CODES_PER_WORD))


def split_packed(
    stored: Mapping[str, StoredTensor], group: int | None
) -> tuple[dict[str, StoredTensor], dict[str, PackedWeight], list[str]]:
    """Split the tensors of a release into (other tensors, INT4 weights by the name of the weight, problems).

    group: elements per scale in config.json; None if it does not describe INT4 weights.
    """
    tensors, weights, problems = dict(stored), dict[str, PackedWeight](), list[str]()
    if group is None:
        return tensors, weights, problems
    for packed in [name for name in stored if name.endswith(".weight" + PACKED_SUFFIX)]:
        name = packed.removesuffix(PACKED_SUFFIX)
        words, scales = tensors.pop(packed), tensors.pop(name + SCALE_SUFFIX, None)
        tensors.pop(name + SHAPE_SUFFIX, None)
        problem = _misfit(words, scales, group)
        if problem or scales is None:
            problems.append(f"{packed} {problem}")
        else:
            weights[name] = PackedWeight(words, scales)
    problems += [f"{name} has no {PACKED_SUFFIX} tensor" for name in tensors if name.endswith(".weight" + SCALE_SUFFIX)]
    return tensors, weights, problems


def _misfit(words: StoredTensor, scales: StoredTensor | None, group: int) -> str:
    """Return why the two tensors do not describe a weight; "" if they do."""
    if scales is None:
        return f"has no {SCALE_SUFFIX} tensor"
    if words.dtype != torch.int32 or len(words.shape) != 2:
        return f"is {words.dtype} {words.shape} instead of an int32 matrix"
    rows, columns = words.shape[0], words.shape[1] * CODES_PER_WORD
    if scales.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"has scales of dtype {scales.dtype}"
    if columns % group or scales.shape != (rows, columns // group):
        return f"{words.shape} has scales {scales.shape} instead of ({rows}, {columns / group:g}) (groups of {group})"
    return ""


class WordWindow:
    """Scales of a window of an INT4 weight, which starts at row `row` and has `rows` rows.

    `scales` [rows of the whole weight, groups]; block: (1, elements per scale).
    Raises: ConversionError if a scale is NaN or infinite.
    """

    def __init__(self, scales: torch.Tensor, block: Block, *, row: int, rows: int) -> None:
        self._scales, self._row, self._group = scales[row : row + rows], row, block[1]
        if not torch.isfinite(self._scales).all():
            raise ConversionError("its scales contain NaN or infinity; the file is corrupt")

    def fill(self, words: torch.Tensor, out: torch.Tensor, *, row: int, column: int) -> None:
        """Fill float32 `out` [rows, n] with the values of columns [column, column + n). `words`: whole rows from `row`
        on."""
        first, last = column // CODES_PER_WORD, -(-(column + out.shape[1]) // CODES_PER_WORD)
        pairs = words[:, first:last].contiguous().view(torch.uint8)
        codes = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)
        out.copy_(codes.narrow(1, column - first * CODES_PER_WORD, out.shape[1])).sub_(_OFFSET)
        scales = self._scales[row - self._row : row - self._row + len(out)].float()
        out.mul_(spread_scales(scales, self._group, column, out.shape[1]))
