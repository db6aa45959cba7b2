"""FP8 block quantisation, compared with direct computation, exhaustive search and transformers."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from model_converters.errors import ConversionError
from model_converters.hf.quant import FP8, ScaleWindow, quantise, scale_shape

BLOCK = (128, 128)


def dequantise(codes, scales, block, dtype):
    """Dequantise a whole weight [M, N] to `dtype`."""
    values = torch.empty(codes.shape)
    ScaleWindow(scales, block, row=0, column=0, shape=tuple(codes.shape)).dequantise(codes, values, row=0, column=0)
    return values.to(dtype)


def naive(codes, scales, block):
    """Dequantise in float64, in which the product of two float32 numbers is exact."""
    wide = scales.double().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return codes.float().double() * wide[: codes.shape[0], : codes.shape[1]]


def random_fp8(shape, block, seed=0):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x7E  # NaN has a separate test
    scales = torch.rand(scale_shape(shape, block), generator=generator) * 1e-3 + 1e-5
    return codes.view(FP8), scales


def test_dequantise_every_code_equals_torch():
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)
    # One by one: a NaN in a tensor changes the code path for all of it.
    values = torch.cat([dequantise(code.view(1, 1), torch.ones(1, 1), BLOCK, torch.float32) for code in codes]).view(-1)
    assert torch.equal(values.isnan(), codes.float().isnan())
    assert values.isnan().sum() == 2
    assert torch.equal(values.nan_to_num(), codes.float().nan_to_num())
    together = dequantise(codes.view(16, 16), torch.ones(1, 1), BLOCK, torch.float32).view(-1)
    assert torch.equal(together.nan_to_num(), values.nan_to_num())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_scale_window_equals_whole_dequantisation(data):
    rows, columns = data.draw(st.integers(1, 150)), data.draw(st.integers(1, 70))
    block = (data.draw(st.integers(1, 160)), data.draw(st.integers(1, 80)))
    codes, scales = random_fp8((rows, columns), block, data.draw(st.integers(0, 9)))
    row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    part = codes[row : row + data.draw(st.integers(1, rows - row)), column:]
    out = torch.full(part.shape, -7.0)
    window = ScaleWindow(scales, block, row=row, column=column, shape=tuple(part.shape))
    window.dequantise(part, out, row=row, column=column)
    whole = naive(codes, scales, block)
    assert torch.equal(out, whole[row : row + part.shape[0], column:].float())
    assert torch.equal(dequantise(codes, scales, block, torch.bfloat16), whole.float().bfloat16())


def test_dequantise_equals_transformers():
    codes, scales = random_fp8((384, 256), BLOCK)
    for dtype in (torch.bfloat16, torch.float32):
        wanted = Fp8Dequantize(None)._dequantize_one(codes, scales, output_dtype=dtype)
        assert torch.equal(dequantise(codes, scales, BLOCK, dtype), wanted)


def test_quantise_names_shapes_dtypes_match_transformers():
    torch.manual_seed(0)
    weight = torch.randn(384, 256)
    config = SimpleNamespace(weight_block_size=BLOCK, scale_fmt="float")
    theirs = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert({"a.weight": weight})
    codes, scales = quantise(weight)
    assert list(theirs) == ["a.weight", "a.weight_scale_inv"]
    assert codes.dtype == theirs["a.weight"].dtype
    assert scales.dtype == theirs["a.weight_scale_inv"].dtype
    # transformers computes two reciprocals, we divide once: the last bit of the scale may differ.
    torch.testing.assert_close(scales, theirs["a.weight_scale_inv"], rtol=2**-22, atol=0)
    assert (codes.float() == theirs["a.weight"].float()).double().mean() > 0.999


@settings(max_examples=40, deadline=None)
@given(*[st.integers(1, 40)] * 2, *[st.integers(1, 20)] * 2, st.sampled_from([1e-43, 1e-38, 1e-3, 1e30]))
def test_quantise_chooses_nearest_code(rows, columns, block_rows, block_columns, size):
    block = (block_rows, block_columns)
    torch.manual_seed(rows * columns)
    weight = torch.randn(rows, columns) * size
    weight[: min(block_rows, rows), : min(block_columns, columns)] = 0
    codes, scales = quantise(weight, block)
    assert tuple(scales.shape) == scale_shape((rows, columns), block)
    assert scales[0, 0] == 1
    for i, j in product(*map(range, scales.shape)):
        there = (slice(i * block_rows, (i + 1) * block_rows), slice(j * block_columns, (j + 1) * block_columns))
        amax = weight[there].abs().max()
        if amax > 448 * torch.finfo(torch.float32).tiny:
            assert scales[i, j] == amax / 448
    every = torch.arange(256, dtype=torch.uint8).view(FP8).double()
    every = every[~every.isnan()]
    exact = weight.double() / naive(torch.ones(rows, columns).to(FP8), scales, block)
    best = (exact[..., None] - every).abs().amin(-1)
    # A quotient close to the midpoint of two codes may first be rounded to the midpoint in float32.
    assert ((exact - codes.double()).abs() <= best + exact.abs() * 2**-23).all()


def test_quantise_non_finite_is_rejected():
    for value in (float("nan"), float("inf"), float("-inf")):
        weight = torch.randn(200, 130)
        weight[150, 129] = value
        with pytest.raises(ConversionError, match="NaN or infinity"):
            quantise(weight)
    with pytest.raises(ConversionError, match="shape \\(3,\\)"):
        quantise(torch.randn(3))


def test_scale_window_corrupt_scales_are_rejected():
    codes, scales = random_fp8((200, 130), BLOCK)
    for value in (float("nan"), float("inf"), 1e38):
        scales[1, 1] = value
        with pytest.raises(ConversionError, match="scales contain NaN"):
            dequantise(codes, scales, BLOCK, torch.bfloat16)


def round_trip(codes, scales):
    values = dequantise(codes, scales, BLOCK, torch.bfloat16)
    return values, *quantise(values)


def test_quantise_round_trip_of_own_bfloat16_has_same_bytes():
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        weight = (torch.randn(300, 400, generator=generator) * 10.0 ** -(2 * seed)).bfloat16()
        codes, scales = quantise(weight)
        _, again, scales_again = round_trip(codes, scales)
        assert torch.equal(again.view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(scales_again, scales)


def test_quantise_round_trip_of_float32_keeps_codes():
    torch.manual_seed(0)
    codes, scales = quantise(torch.randn(512, 512) * 0.02)  # scales are not representable in bfloat16
    values, again, scales_again = round_trip(codes, scales)
    assert torch.equal(again.view(torch.uint8), codes.view(torch.uint8))
    assert not torch.equal(scales_again, scales)
    assert ((scales_again - scales).abs() <= scales * 2**-8).all()
    second, third, third_scales = round_trip(again, scales_again)
    assert not torch.equal(second, values)
    steps = (second.view(torch.int16).int() - values.view(torch.int16).int()).abs()
    assert steps.max() == 1
    assert torch.equal(third.view(torch.uint8), again.view(torch.uint8))
    assert torch.equal(third_scales, scales_again)


def test_quantise_without_record_changes_power_of_two_scales():
    torch.manual_seed(0)
    weight = torch.randn(256, 256)
    scales = torch.full((2, 2), 2.0**-6)
    codes = (weight * 2**6).to(FP8)
    assert codes.float().abs().max() < 448
    values, again, scales_again = round_trip(codes, scales)
    assert not torch.equal(dequantise(again, scales_again, BLOCK, torch.bfloat16), values)


def random_codes(shape, largest, seed=0):
    """Return e4m3 codes of magnitude at most `largest`, including both zeros and subnormals."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).view(torch.float8_e4m3fn)
    wrong = ~(codes.float().abs() <= largest)  # NaN as well
    return torch.where(wrong, torch.zeros(()), codes.float()).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("largest", [448, 224, 3.5], ids=["full", "two scales possible", "low"])
@pytest.mark.parametrize(
    ("power_of_two", "scale_dtype"),
    [(True, torch.float32), (True, torch.float8_e8m0fnu), (False, torch.float32), (False, torch.bfloat16)],
)
def test_quantise_unchanged_release_gives_the_same_bytes(power_of_two, scale_dtype, largest):
    """The scales of a block may have been chosen by any writer."""
    codes = random_codes((200, 130), largest)
    exponents = torch.randint(-20, 4, (4, 3), generator=torch.Generator().manual_seed(1))
    scales = torch.ldexp(torch.ones(4, 3), exponents) * (1 if power_of_two else 1.37)
    scales = scales.to(scale_dtype)
    values = dequantise(codes, scales.float(), (64, 64), torch.bfloat16)
    release = {"power_of_two": power_of_two, "scale_dtype": scale_dtype, "original_scales": scales}
    found = quantise(values, (64, 64), **release)
    assert torch.equal(found[0].view(torch.uint8), codes.view(torch.uint8))
    assert found[1].dtype == scale_dtype
    assert torch.equal(found[1].float(), scales.float())
    changed = values.clone()
    changed[70, 70] *= 1.0625  # a block in the middle
    again = quantise(changed, (64, 64), **release)
    others = torch.ones(4, 3, dtype=torch.bool)
    others[1, 1] = False
    assert torch.equal(again[1].float()[others], scales.float()[others])


@pytest.mark.parametrize("amax", [448.0, 449.0, 224.0, 1e-3, 3e38, 1e-37])
def test_quantise_power_of_two_scale_is_the_smallest_that_fits(amax):
    """The reference is amax / 448, rounded up to a power of two in exact arithmetic (DeepGEMM's ceil_to_ue8m0)."""
    weight = torch.full((4, 4), float(torch.tensor(amax)))
    _, scales = quantise(weight, (4, 4), power_of_two=True)
    wanted = Fraction(1)
    ratio = Fraction(float(weight[0, 0])) / 448
    while wanted < ratio:
        wanted *= 2
    while wanted / 2 >= ratio and wanted / 2 >= Fraction(2) ** -126:
        wanted /= 2
    assert Fraction(float(scales)) == wanted
