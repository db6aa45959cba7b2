"""Reading of FP8 checkpoints as dequantised values."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model_converters.errors import ConversionError
from model_converters.families import family_for
from model_converters.hf.io import HFCheckpoint
from model_converters.hf.quant import FP8, quantise
from model_converters.mapping.layout import TrainLayout
from tests.unit.converters.hf_models import assert_same, load_rank, write_hf

BLOCK = (5, 3)
FP8_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
SCALE = "_scale_inv"


def write(directory, config, tensors, **quantisation):
    config = {**config, "torch_dtype": "bfloat16", "quantization_config": FP8_CONFIG | quantisation}
    return write_hf(directory, config, tensors)


def quantised(tensors, block=BLOCK):
    """Quantise all projections. Returns the stored tensors and their float32 values by direct computation."""
    stored, values = {}, {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            stored[name] = tensor.bfloat16()
            values[name] = stored[name].float()
            continue
        stored[name], stored[name + SCALE] = quantise(tensor, block)
        scales = stored[name + SCALE].repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        values[name] = stored[name].float() * scales[: tensor.shape[0], : tensor.shape[1]]
    return stored, values


@pytest.fixture
def fp8_model(tmp_path, moe_config, random_hf):
    stored, values = quantised(random_hf(moe_config))
    return write(tmp_path / "hf", moe_config, stored), stored, values


def test_fp8_source_shows_values_and_hides_scales(fp8_model):
    directory, stored, values = fp8_model
    with HFCheckpoint(directory) as checkpoint:
        assert checkpoint.shapes == {name: tuple(value.shape) for name, value in values.items()}
        for name, value in values.items():
            assert checkpoint.dtype(name) == torch.bfloat16
            assert torch.equal(checkpoint.read(name), value.bfloat16())
            assert torch.equal(checkpoint.view(name), value.bfloat16())
            # Values are rounded once: a float32 target has digits that bfloat16 would lose.
            out = torch.empty(value.shape)
            checkpoint.read_into(name, out)
            assert torch.equal(out, value)
            codes, scales = checkpoint.stored(name)
            assert torch.equal(codes.view(torch.uint8), stored[name].view(torch.uint8))
            assert torch.equal(scales, stored[name + SCALE]) if scales is not None else name + SCALE not in stored


@pytest.mark.parametrize(
    "layout",
    [
        TrainLayout(8, tp=4, pp=2, ep=2),
        TrainLayout(4, tp=2, ep=2, etp=2),
        TrainLayout(8, tp=2, ep=2, etp=2, shard_parameters=True),
    ],
    ids=str,
)
def test_fp8_source_ranks_load_dequantised_slices(layout, fp8_model, tmp_path, moe_config):
    directory, _, values = fp8_model
    with HFCheckpoint(directory) as ours, HFCheckpoint(write_hf(tmp_path / "plain", moe_config, values)) as plain:
        for rank in range(layout.world_size):
            assert_same(load_rank(ours, layout, rank), load_rank(plain, layout, rank))


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A weight larger than the 64 x 2048 tiles of the computation, with blocks that divide neither size."""
    weight = torch.randn(150, 2500, generator=torch.Generator().manual_seed(0))
    stored, values = quantised({"a_proj.weight": weight}, block=(50, 96))
    directory = tmp_path_factory.mktemp("wide")
    with HFCheckpoint(write(directory, {"model_type": "qwen3"}, stored, weight_block_size=[50, 96])) as checkpoint:
        yield checkpoint, values["a_proj.weight"]


@settings(max_examples=60, deadline=None)
@given(dim=st.integers(0, 1), data=st.data())
def test_fp8_source_slices_equal_whole_tensor(wide, dim, data):
    checkpoint, value = wide
    start = data.draw(st.integers(0, value.shape[dim] - 1))
    length = data.draw(st.integers(1, value.shape[dim] - start))
    wanted, rows = value.narrow(dim, start, length), None
    if dim == 1:
        first = data.draw(st.integers(0, value.shape[0]))
        rows = first, data.draw(st.integers(first, value.shape[0]))
        wanted = wanted[slice(*rows)]
    larger = torch.full((wanted.shape[0] + 2, wanted.shape[1] + 2), -7.0)
    checkpoint.read_into("a_proj.weight", larger[1:-1, 1:-1], dim=dim, start=start, rows=rows)
    assert torch.equal(larger[1:-1, 1:-1], wanted)
    assert (larger == -7).sum() == larger.numel() - wanted.numel()
    assert torch.equal(checkpoint.view("a_proj.weight", dim, start, length, rows), wanted.bfloat16())


def test_read_into_slice_outside_tensor_is_rejected(wide):
    checkpoint, _ = wide
    with pytest.raises(ConversionError, match=r"a_proj.weight .* has no slice of shape \(2, 2500\) from 149"):
        checkpoint.read_into("a_proj.weight", torch.zeros(2, 2500), start=149)


def test_fp8_source_scale_dtypes_are_accepted(tmp_path):
    scales = torch.tensor([[0.25, 2.0], [0.5, 1.0]])
    codes = torch.randn(10, 6).to(FP8)
    wanted = codes.float() * scales.repeat_interleave(5, 0).repeat_interleave(3, 1)
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e8m0fnu):
        stored = {"a_proj.weight": codes, "a_proj.weight_scale_inv": scales.to(dtype)}
        with HFCheckpoint(write(tmp_path / "hf", {"model_type": "qwen3"}, stored)) as checkpoint:
            assert torch.equal(checkpoint.read("a_proj.weight"), wanted.bfloat16())


NAME = "model.layers.0.self_attn.q_proj.weight"
SCALES = f"{NAME}_scale_inv"
VECTOR = torch.zeros(3)
MISFITS = {
    "weight without scale": ({SCALES: None}, f"{NAME} has no {SCALES}"),
    "scale without weight": ({NAME: None}, f"{SCALES} has no float8 weight {NAME}"),
    "weight is not FP8": ({NAME: torch.Tensor.bfloat16}, f"{SCALES} has no float8 weight {NAME}"),
    "scale of another shape": (
        {SCALES: lambda scales: scales[:-1]},
        rf"{SCALES} \(9, 4\) instead of \(10, 4\) \(blocks of \(5, 3\)\)",
    ),
    "scale of integers": ({SCALES: torch.Tensor.int}, f"{SCALES} is torch.int32"),
    "e5m2": ({"z": VECTOR.to(torch.float8_e5m2)}, "z is torch.float8_e5m2"),
    "a vector": ({"z": VECTOR.to(FP8), "z_scale_inv": torch.ones(1)}, r"z \(3,\) is float8, but not a matrix"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_fp8_source_mismatched_scales_are_named(misfit, fp8_model, moe_config):
    directory, stored, _ = fp8_model
    changes, message = MISFITS[misfit]
    for name, change in changes.items():
        stored[name] = change(stored[name]) if callable(change) else change
    stored = {name: tensor for name, tensor in stored.items() if tensor is not None}
    with pytest.raises(ConversionError, match=message):
        HFCheckpoint(write(directory, moe_config, stored))


def test_fp8_source_all_mismatches_are_in_one_message(fp8_model, moe_config):
    directory, stored, _ = fp8_model
    other = NAME.replace("q_proj", "v_proj")
    del stored[NAME + SCALE], stored[other]
    with pytest.raises(ConversionError, match=f"{other}_scale_inv has no .*{NAME} has no"):
        HFCheckpoint(write(directory, moe_config, stored))


def test_fp8_source_without_quantization_config_is_rejected(fp8_model, moe_config):
    directory, _, _ = fp8_model
    (directory / "config.json").write_text(json.dumps(moe_config))
    with pytest.raises(ConversionError, match=r"91 FP8 tensors, such as model.layers.0.* config.json has no quant"):
        HFCheckpoint(directory)


def test_fp8_source_corrupt_scales_name_the_weight(fp8_model, moe_config):
    directory, stored, _ = fp8_model
    stored[NAME + SCALE][0, 0] = float("nan")
    with (
        HFCheckpoint(write(directory, moe_config, stored)) as checkpoint,
        pytest.raises(ConversionError, match=f"{NAME}: its scales contain NaN"),
    ):
        checkpoint.read(NAME)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "awq"}, r"\(awq\) is not supported"),
        ({"fmt": "e5m2"}, r"\(fp8\): fmt 'e5m2' is not supported"),
        ({"activation_scheme": "static"}, r"\(fp8\): activation_scheme 'static'"),
        ({"weight_block_size": [128]}, r"weight_block_size \[128\] must be two whole numbers"),
        ({"weight_block_size": [128, 0]}, r"weight_block_size \[128, 0\] must be two whole numbers"),
        ({"modules_to_convert": ["model.embed_tokens"]}, r"modules_to_convert \['model.embed_tokens'\]"),
        ({"kv_cache_scheme": {"num_bits": 8}}, r"\(fp8\): kv_cache_scheme is not supported"),
    ],
)
def test_fp8_block_other_quantisation_is_rejected_by_name(change, message, dense_config):
    config = dense_config | {"quantization_config": FP8_CONFIG | change}
    with pytest.raises(ConversionError, match=message):
        family_for(config).rows(config)


def test_fp8_block_fields_of_releases_are_accepted(dense_config):
    for change in ({"fmt": None}, {"scale_fmt": "ue8m0"}, {"modules_to_not_convert": ["lm_head"]}):
        config = dense_config | {"quantization_config": FP8_CONFIG | change}
        assert family_for(config).rows(config)


def test_weights_dtype_unknown_name_is_rejected(fp8_model):
    directory, _, _ = fp8_model
    config = json.loads((directory / "config.json").read_text()) | {"torch_dtype": "int4ish"}
    (directory / "config.json").write_text(json.dumps(config))
    with HFCheckpoint(directory) as checkpoint, pytest.raises(ConversionError, match="dtype 'int4ish' is not a torch"):
        checkpoint.dtype(NAME)
