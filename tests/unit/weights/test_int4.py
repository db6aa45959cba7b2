"""INT4 words and scales equal those of compressed-tensors, bit for bit."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize

from mcore_rl.config.quantization import GROUPS
from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.int4 import dequantised, quantise_into, rounded

ROWS, COLUMNS = 300, 512


def weights() -> torch.Tensor:
    """Random rows, and rows of zeros of both signs, of ties, of the largest magnitudes, and of very small values."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(ROWS, COLUMNS, generator=generator) * torch.logspace(-6, 3, ROWS)[:, None]
    values[0], values[1], values[2, ::3] = 0.0, -0.0, -0.0
    values[3] = torch.arange(COLUMNS) % 15 / 2 - 3.5  # the scale is 0.5: multiples of half a code
    values[4] = 3.0 * (1 - torch.arange(COLUMNS) % 2 * 2)  # +-amax only
    values[5], values[6], values[7] = 1e-38, -1e-40, torch.finfo(torch.bfloat16).max
    values[8], values[8, 5] = 0.0, 1.0
    return values.bfloat16()


def written(values: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = values.shape
    places = torch.zeros(rows, columns // 8, dtype=torch.int32), torch.zeros(rows, columns // group).bfloat16()
    quantise_into(values, places, hf_name="w", dtype=torch.bfloat16, group=group)
    return places


def expected(values: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return words, scales and values of compressed-tensors, which gets the scales and computes in float32."""
    amax = values.double().unflatten(1, (-1, group)).abs().amax(-1)
    scales = (amax / 7).float().clamp_min(2.0**-126).bfloat16()
    scales[amax == 0] = 1
    options = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    arguments = QuantizationArgs(**options)
    codes = quantize(values.float(), scales.float(), None, arguments, dtype=torch.int8)
    words = pack_to_int32(codes, 4)
    again = unpack_from_int32(words, 4, values.shape)
    return words, scales, dequantize(again, scales.float(), None, arguments).bfloat16()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("group", GROUPS)
def test_words_scales_and_values_equal_compressed_tensors(group: int) -> None:
    values = weights()
    words, scales, represented = expected(values, group)
    found = written(values, group)
    assert torch.equal(found[0], words)
    assert torch.equal(bits(found[1]), bits(scales))
    assert torch.equal(bits(dequantised(*found, torch.bfloat16)), bits(represented))
    assert torch.equal(bits(rounded(values, group)), bits(represented))
    assert len(words.view(torch.uint8).unique()) > 200, "codes of all values"


def test_float32_values_are_rounded_to_bfloat16_first() -> None:
    values = torch.randn(40, 64, generator=torch.Generator().manual_seed(2))
    assert torch.equal(written(values, 32)[0], written(values.bfloat16(), 32)[0])
    assert torch.equal(rounded(values, 32), rounded(values.bfloat16(), 32).float())


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_nan_or_infinity_is_named(value: float) -> None:
    values = weights()
    values[280, 3] = value
    with pytest.raises(WeightSyncError, match=r"^w contains NaN or infinity"):
        written(values, 32)
