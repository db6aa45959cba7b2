"""Reading of INT4 releases (compressed-tensors, pack-quantized) as values, compared with compressed-tensors itself."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization.lifecycle.forward import dequantize

from model_converters.errors import ConversionError
from model_converters.hf.io import HFCheckpoint
from model_converters.mapping.layout import TrainLayout
from tests.exported import export_through
from tests.unit.converters.hf_models import assert_same, load_rank, write_hf

GROUP = 8
SCHEME = {
    "actorder": None,
    "dynamic": False,
    "group_size": GROUP,
    "num_bits": 4,
    "strategy": "group",
    "symmetric": True,
    "type": "int",
}
INT4 = {
    "config_groups": {"group_0": {"input_activations": None, "targets": ["Linear"], "weights": SCHEME}},
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
}
SIZES = {"hidden_size": 24, "moe_intermediate_size": 16, "torch_dtype": "bfloat16"}


def packed(name, shape, generator, group=GROUP):
    """Return the stored tensors of a random INT4 weight, and the values that compressed-tensors computes from them with
    float32 scales; with the bfloat16 scales it computes the same values, rounded."""
    codes = torch.randint(-8, 8, shape, generator=generator, dtype=torch.int8)
    scales = torch.randn(shape[0], shape[1] // group, generator=generator).bfloat16()
    stored = {
        f"{name}_packed": pack_to_int32(codes, 4),
        f"{name}_scale": scales,
        f"{name}_shape": torch.tensor(shape),
    }
    exact = dequantize(codes, scales.float())
    assert torch.equal(exact.bfloat16(), dequantize(codes, scales))
    return stored, exact


def scheme(**changes):
    """quantization_config of INT4 weights."""
    return INT4 | {"config_groups": {"group_0": INT4["config_groups"]["group_0"] | {"weights": SCHEME | changes}}}


def int4_release(config, random_hf, group=GROUP, **sizes):
    """Return (config.json, stored tensors, values) of a model whose experts are INT4, as in Kimi-K2-Thinking."""
    config = config | SIZES | sizes | {"quantization_config": scheme(group_size=group)}
    stored, values, generator = {}, {}, torch.Generator().manual_seed(2)
    for name, tensor in random_hf(config).items():
        if ".experts." in name:
            parts, values[name] = packed(name, tuple(tensor.shape), generator, group)
            stored |= parts
        else:
            keeps = name.endswith("e_score_correction_bias")
            stored[name] = values[name] = tensor if keeps else tensor.bfloat16()
    return config, stored, values


@pytest.fixture
def release(family_configs, random_hf):
    return int4_release(family_configs["kimi_k2"], random_hf)


def test_int4_source_values_equal_compressed_tensors(release, tmp_path):
    config, stored, values = release
    with HFCheckpoint(write_hf(tmp_path, config, stored)) as checkpoint:
        assert checkpoint.shapes == {name: tuple(value.shape) for name, value in values.items()}
        for name, value in values.items():
            rounded = value.to(checkpoint.dtype(name))
            assert rounded.dtype == (torch.float32 if name.endswith("bias") else torch.bfloat16)
            assert torch.equal(checkpoint.read(name), rounded)
            assert torch.equal(checkpoint.view(name), rounded)
            # Values are rounded once: a float32 target has digits that bfloat16 would lose.
            out = torch.empty(value.shape)
            checkpoint.read_into(name, out)
            assert torch.equal(out, value.float())


@pytest.mark.parametrize(
    "layout",
    [
        TrainLayout(8, tp=4, pp=2, ep=2),
        # Two ranks divide each expert: columns of down_proj begin inside a group.
        TrainLayout(4, tp=4, ep=1, etp=4),
        TrainLayout(8, tp=2, ep=2, etp=2, shard_parameters=True),
    ],
    ids=str,
)
def test_int4_source_ranks_load_slices_of_values(layout, release, tmp_path):
    config, stored, values = release
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    with (
        HFCheckpoint(write_hf(tmp_path / "int4", config, stored)) as ours,
        HFCheckpoint(write_hf(tmp_path / "plain", plain, values)) as expected,
    ):
        for rank in range(layout.world_size):
            assert_same(load_rank(ours, layout, rank), load_rank(expected, layout, rank))


def test_int4_source_export_has_values_and_no_quantisation(release, tmp_path):
    config, stored, values = release
    write_hf(tmp_path / "hf", config, stored)
    export_through(tmp_path / "hf", tmp_path / "out", TrainLayout(4, tp=2, ep=2))
    with HFCheckpoint(tmp_path / "out") as exported:
        assert "quantization_config" not in exported.config
        assert exported.shapes.keys() == values.keys()
        for name, value in values.items():
            assert torch.equal(exported.read(name), value.to(exported.dtype(name))), name


# Kimi-K2-Thinking and K2.5 have groups of 32. Their sizes are multiples of a group.
@pytest.mark.parametrize("group", [32, 128])
def test_int4_text_of_release_with_images_equals_text_release(group, family_configs, random_hf, tmp_path):
    sizes = {"hidden_size": group, "moe_intermediate_size": 2 * group}
    config, stored, values = int4_release(family_configs["kimi_k2"], random_hf, group, **sizes)
    outer = {"model_type": "kimi_k25", "vision_config": {"hidden_size": 16}, "text_config": config}
    images = {"vision_tower.patch_embed.proj.weight": torch.ones(4, 4), "mm_projector.proj.0.weight": torch.ones(4, 4)}
    named = {f"language_model.{name}": tensor for name, tensor in stored.items()} | images
    export_through(write_hf(tmp_path / "hf", outer, named), tmp_path / "out", TrainLayout(4, tp=2, ep=2))
    with HFCheckpoint(tmp_path / "hf") as release, HFCheckpoint(tmp_path / "out") as exported:
        assert release.unlisted.notes[-1] == "2 tensors of the vision tower are left out"
        assert exported.config["model_type"] == "kimi_k2"
        assert not {"quantization_config", "text_config", "vision_config"} & exported.config.keys()
        assert release.shapes.keys() == exported.shapes.keys() == values.keys()
        for name, value in values.items():
            for checkpoint in (release, exported):
                assert torch.equal(checkpoint.read(name), value.to(checkpoint.dtype(name))), name


NAME = "model.layers.2.mlp.experts.0.up_proj.weight"
MISFITS = {
    "no scales": ({f"{NAME}_scale": None}, f"{NAME}_packed has no _scale tensor"),
    "no words": ({f"{NAME}_packed": None}, f"{NAME}_scale has no _packed tensor"),
    "other groups": ({f"{NAME}_scale": torch.ones(16, 2)}, r"has scales \(16, 2\) instead of \(16, 3\)"),
    "bytes": ({f"{NAME}_packed": torch.zeros(16, 3, dtype=torch.uint8)}, "is torch.uint8"),
}


@pytest.mark.parametrize(("changes", "message"), MISFITS.values(), ids=MISFITS)
def test_int4_source_misfit_is_rejected_by_name(changes, message, release, tmp_path):
    config, stored, _ = release
    changed = {name: tensor for name, tensor in (stored | changes).items() if tensor is not None}
    with pytest.raises(ConversionError, match=f"INT4 words and scales do not match: .*{message}"):
        HFCheckpoint(write_hf(tmp_path, config, changed))


def test_int4_source_scale_with_nan_is_rejected(release, tmp_path):
    config, stored, _ = release
    stored[f"{NAME}_scale"][3, 1] = float("nan")
    with (
        HFCheckpoint(write_hf(tmp_path, config, stored)) as checkpoint,
        pytest.raises(ConversionError, match=f"{NAME}: its scales contain NaN or infinity"),
    ):
        checkpoint.read(NAME)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized'; only INT4 in groups"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is set; only INT4"),
        ({"config_groups": {}}, "config_groups must have one scheme"),
        ({"weights": {"num_bits": 8}}, "weights.num_bits 8; only INT4"),
        ({"weights": {"symmetric": False}}, "weights.symmetric False; only INT4"),
        ({"weights": {"actorder": "group"}}, "weights.actorder 'group'; only INT4"),
        ({"weights": {"group_size": None}}, "weights.group_size None must be a whole number"),
    ],
)
def test_int4_source_other_scheme_is_rejected_by_name(change, message, release, tmp_path):
    config, stored, _ = release
    config["quantization_config"] = scheme(**change.pop("weights", {})) | change
    with pytest.raises(ConversionError, match=message):
        HFCheckpoint(write_hf(tmp_path, config, stored))
