"""Merging of LoRA adapters, compared with PEFT, and rejected adapters."""

from __future__ import annotations

import json

import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from model_converters.errors import ConversionError
from model_converters.hf.io import HFCheckpoint
from model_converters.hf.quant import quantise
from model_converters.mapping.layout import TrainLayout
from tests.tiny_models import tiny_model
from tests.unit.converters.hf_models import assert_same, load_rank, write_hf

TARGETS = ["q_proj", "v_proj", "o_proj", "down_proj", "lm_head"]
OPTIONS = {
    "rslora": {"r": 4, "lora_alpha": 12, "use_rslora": True},
    "patterns": {
        "r": 4,
        "lora_alpha": 12,
        # The first pattern that matches the end of a module name applies.
        "rank_pattern": {r"layers\.[01]\.self_attn\.q_proj": 8, "o_proj": 2, "self_attn.o_proj": 16},
        "alpha_pattern": {"down_proj": 7, r"model\.layers\.3\.self_attn\.v_proj": 3.5, "proj": 99},
    },
}


def peft_merged(directory, options):
    """Return (base directory, adapter directory, tensors merged by PEFT in float32)."""
    base = tiny_model("qwen3")
    base.save_pretrained(directory / "hf")
    torch.manual_seed(0)
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=TARGETS, init_lora_weights="gaussian", **options))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    # By default PEFT adds a copy of the head's base weight.
    model.save_pretrained(directory / "adapter", save_embedding_layers=False)
    loaded = peft.PeftModel.from_pretrained(tiny_model("qwen3"), directory / "adapter")
    return directory / "hf", directory / "adapter", loaded.merge_and_unload().state_dict()


@pytest.mark.parametrize("options", OPTIONS)
def test_lora_merge_equals_peft(options, tmp_path):
    base, adapter, merged = peft_merged(tmp_path, OPTIONS[options])
    original = load_file(base / "model.safetensors")
    with HFCheckpoint(base, lora=adapter) as checkpoint:
        assert set(checkpoint.shapes) == set(merged)
        for name, wanted in merged.items():
            changed = name.split(".")[-2] in TARGETS
            assert torch.equal(wanted, original[name]) != changed
            # Same operations in the same order, except the summation order of the r terms in a matrix product.
            torch.testing.assert_close(checkpoint.read(name), wanted, rtol=1e-6, atol=1e-6)
            assert torch.equal(checkpoint.read(name), original[name]) != changed
            assert torch.equal(checkpoint.stored(name)[0], original[name])


def write_adapter(directory, pairs, whole=None, **config):
    directory.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "bias": "none", "target_modules": ["x"]} | config
    (directory / "adapter_config.json").write_text(json.dumps(config))
    tensors = {
        f"base_model.model.{module}.lora_{side}.weight": tensor.clone()
        for module, pair in pairs.items()
        for side, tensor in zip("AB", pair, strict=True)
        if tensor is not None
    }
    tensors |= {f"base_model.model.{name}": tensor for name, tensor in (whole or {}).items()}
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def random_pair(shape, rank=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rank, shape[1], generator=generator), torch.randn(shape[0], rank, generator=generator)


@pytest.fixture
def merged_moe(tmp_path, moe_config, random_hf):
    """MoE with adapters on attention and single experts: directories, and merged values by direct computation."""
    hf = random_hf(moe_config)
    modules = [name.removesuffix(".weight") for name in hf if name.endswith(("q_proj.weight", "o_proj.weight"))]
    modules += [f"model.layers.2.mlp.experts.{expert}.{part}_proj" for expert in (0, 5) for part in ("gate", "down")]
    pairs = {module: random_pair(hf[f"{module}.weight"].shape, seed=seed) for seed, module in enumerate(modules)}
    adapter = write_adapter(tmp_path / "adapter", pairs)
    values = dict(hf)
    for module, (a, b) in pairs.items():
        values[f"{module}.weight"] = hf[f"{module}.weight"].double() + 2 * (b.double() @ a.double())
    return write_hf(tmp_path / "hf", moe_config, hf), adapter, values


def test_lora_merge_ranks_load_merged_slices(merged_moe, tmp_path, moe_config):
    directory, adapter, values = merged_moe
    with HFCheckpoint(directory, lora=adapter) as checkpoint:
        whole = {name: checkpoint.read(name) for name in checkpoint.shapes}
        for name, value in values.items():
            torch.testing.assert_close(whole[name], value.float(), rtol=1e-6, atol=1e-6)
        with HFCheckpoint(write_hf(tmp_path / "whole", moe_config, whole)) as plain:
            for layout in (TrainLayout(8, tp=4, pp=2, ep=2), TrainLayout(4, tp=2, ep=2, etp=2)):
                for rank in range(layout.world_size):
                    assert_same(load_rank(checkpoint, layout, rank), load_rank(plain, layout, rank))


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A float32 and an FP8 weight with adapters, both larger than the 64 x 2048 tiles of the computation."""
    directory = tmp_path_factory.mktemp("wide")
    weight = torch.randn(150, 2500, generator=torch.Generator().manual_seed(0))
    codes, scales = quantise(weight, (50, 96))
    quantisation = {"quant_method": "fp8", "weight_block_size": [50, 96]}
    config = {"model_type": "qwen3", "torch_dtype": "bfloat16", "quantization_config": quantisation}
    write_hf(directory, config, {"a.weight": weight, "b.weight": codes, "b.weight_scale_inv": scales})
    pairs = {"a": random_pair(weight.shape, 5), "b": random_pair(weight.shape, 5)}
    adapter = write_adapter(directory / "adapter", pairs, r=5, lora_alpha=2.5)
    delta = 0.5 * (pairs["a"][1].double() @ pairs["a"][0].double())
    wide_scales = scales.repeat_interleave(50, 0).repeat_interleave(96, 1)[:, :2500]
    with HFCheckpoint(directory, lora=adapter) as checkpoint:
        yield checkpoint, {"a.weight": weight + delta, "b.weight": codes.float() * wide_scales + delta}


@pytest.mark.parametrize("name", ["a.weight", "b.weight"])
def test_lora_merge_wide_weight_with_and_without_fp8(wide, name):
    checkpoint, values = wide
    out = torch.empty(150, 2500)
    checkpoint.read_into(name, out)
    # Tolerance: float32 sums of five products and the weight.
    torch.testing.assert_close(out, values[name].float(), rtol=1e-5, atol=1e-6)
    rounded = torch.empty(150, 2500, dtype=torch.bfloat16)
    checkpoint.read_into(name, rounded)
    assert torch.equal(rounded, out.bfloat16())


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(["a.weight", "b.weight"]), dim=st.integers(0, 1), data=st.data())
def test_lora_merge_slices_equal_whole_tensor(wide, name, dim, data):
    checkpoint, _ = wide
    whole = torch.empty(150, 2500)
    checkpoint.read_into(name, whole)
    start = data.draw(st.integers(0, whole.shape[dim] - 1))
    wanted = whole.narrow(dim, start, data.draw(st.integers(1, whole.shape[dim] - start)))
    out = torch.empty(wanted.shape)
    checkpoint.read_into(name, out, dim=dim, start=start)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_modules_replace_base_tensors_like_peft(dtype, tmp_path):
    """The adapter is float32; PEFT keeps the base model's dtype."""
    tiny_model("qwen3").to(dtype).save_pretrained(tmp_path / "hf")
    modules = ["lm_head", "embed_tokens", "norm", "mlp"]  # all norms end with the third, the last has others inside
    options = peft.LoraConfig(target_modules=["q_proj"], r=4, modules_to_save=modules)
    model = peft.get_peft_model(tiny_model("qwen3"), options)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "modules_to_save" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "adapter")
    base = tiny_model("qwen3").to(dtype)
    original = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    merged = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    with HFCheckpoint(tmp_path / "hf", lora=tmp_path / "adapter") as checkpoint:
        assert set(checkpoint.shapes) == set(merged)
        for name, wanted in merged.items():
            assert checkpoint.dtype(name) == wanted.dtype == dtype
            assert torch.equal(checkpoint.read(name), wanted), name
            assert torch.equal(checkpoint.view(name, 0, 1, 2), wanted[1:3])
            # Without training, the adapter of q_proj changes nothing.
            assert torch.equal(wanted, original[name]) == (".self_attn." in name and "_norm" not in name), name


def test_saved_modules_that_untie_embeddings_are_rejected(tmp_path, dense_config, random_hf):
    config = dense_config | {"tie_word_embeddings": True, "vocab_size": 24}
    directory = write_hf(tmp_path / "hf", config, random_hf(config))
    whole = {f"{name}.weight": torch.full((24, 12), 3.0) for name in ("model.embed_tokens", "lm_head")}
    for name, tensor in whole.items():
        adapter = write_adapter(tmp_path / "adapter", {}, {name: tensor}, modules_to_save=[name.split(".")[-2]])
        with pytest.raises(ConversionError, match=f"{name} alone would untie embedding and head"):
            HFCheckpoint(directory, lora=adapter)
    adapter = write_adapter(tmp_path / "adapter", {}, whole, modules_to_save=["embed_tokens", "lm_head"])
    with HFCheckpoint(directory, lora=adapter) as checkpoint:
        assert (checkpoint.read("model.embed_tokens.weight") == 3).all()


def assert_refused(directory, adapter, messages):
    with pytest.raises(ConversionError) as error:
        HFCheckpoint(directory, lora=adapter)
    assert [message for message in messages if message not in str(error.value)] == []


def test_saved_modules_of_wrong_shape_are_named(merged_moe):
    directory, adapter, _ = merged_moe
    whole = {"lm_head.weight": torch.zeros(25, 12), f"{Q}.weight": torch.zeros(48, 12), "absent.weight": torch.zeros(1)}
    write_adapter(adapter, {Q: random_pair((48, 12))}, whole, modules_to_save=["lm_head", "q_proj", "absent"])
    messages = (
        "lm_head.weight of modules_to_save is torch.float32 (25, 12), in the base model (23, 12)",
        f"{Q}.weight is saved whole and adapted",
        "modules_to_save names absent.weight, which the model does not have",
    )
    assert_refused(directory, adapter, messages)


Q = "model.layers.0.self_attn.q_proj"
REFUSED = {
    "dora": ({"use_dora": True}, "use_dora True"),
    "bias": ({"bias": "lora_only"}, "bias 'lora_only', only 'none'"),
    "lora_bias": ({"lora_bias": True}, "lora_bias True"),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, r"modules_to_save 'lm_head' has no tensor in the adapter"),
    "no list of modules": ({"modules_to_save": "lm_head"}, r"modules_to_save 'lm_head', which must be a list of names"),
    "target_parameters": ({"target_parameters": ["experts.down_proj"]}, "target_parameters"),
    "fan_in_fan_out": ({"fan_in_fan_out": True}, "fan_in_fan_out True"),
    "another method": ({"peft_type": "IA3"}, "peft_type 'IA3', only 'LORA'"),
    "changed base": ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4', which may have"),
    "replicated layers": ({"layer_replication": [[0, 2]]}, "layer_replication"),
    "a field of tomorrow": ({"use_something_new": True}, "use_something_new True"),
    "no rank": ({"r": None}, "r None, which must be a number of at least 1"),
    "no alpha": ({"lora_alpha": None}, "lora_alpha None, which must be a number"),
    "no regular expression": ({"rank_pattern": {"(": 4}}, r"rank_pattern '\(', which is not a regular expression"),
    "another rank": ({"r": 4}, rf"{Q}.lora_A torch.float32 \(3, 12\) instead of \(4, 12\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_lora_adapter_unsupported_field_is_rejected_by_name(case, merged_moe):
    directory, adapter, _ = merged_moe
    change, message = REFUSED[case]
    write_adapter(adapter, {Q: random_pair((48, 12))}, **change)
    with pytest.raises(ConversionError, match=rf"adapter: this adapter cannot be merged: .*{message}"):
        HFCheckpoint(directory, lora=adapter)


def test_lora_adapter_all_problems_are_in_one_message(merged_moe):
    directory, adapter, _ = merged_moe
    a, b = random_pair((48, 12))
    pairs = {
        Q: (a, None),
        Q.replace("0", "1"): (a.half().to(torch.float8_e4m3fn), b),
        Q.replace("q_proj", "qkv_proj"): (a, b),
        "model.layers.0.input_layernorm": (a, b),
        Q.replace("0", "2"): (a, b[1:]),
    }
    whole = {
        "model.embed_tokens.lora_embedding_A": torch.zeros(3, 24),
        "lm_head.base_layer.weight": torch.zeros(24, 12),
    }
    write_adapter(adapter, pairs, whole, use_dora=True)
    messages = (
        "use_dora True",
        f"{Q} lacks lora_B",
        f"{Q.replace('0', '1')}.lora_A torch.float8_e4m3fn (3, 12)",
        f"the model has no {Q.replace('q_proj', 'qkv_proj')}.weight",
        "model.layers.0.input_layernorm.weight (12,) is not a matrix",
        f"{Q.replace('0', '2')}.lora_B torch.float32 (47, 3) instead of (48, 3)",
        "embed_tokens.lora_embedding_A is neither lora_A nor lora_B of a linear layer",
        "lm_head.base_layer.weight is neither lora_A nor lora_B of a linear layer (save the adapter with save_embed",
    )
    assert_refused(directory, adapter, messages)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "adapter_config.json").unlink(), r"adapter_config.json does not exist"),
        (lambda d: (d / "adapter_config.json").write_text("{"), r"adapter_config.json cannot be read as JSON"),
        (lambda d: (d / "adapter_model.safetensors").unlink(), r"adapter_model.safetensors does not exist"),
        (lambda d: write_adapter(d, {}), "it contains no tensor"),
    ],
)
def test_lora_adapter_broken_directory_names_file(damage, message, merged_moe):
    directory, adapter, _ = merged_moe
    damage(adapter)
    with pytest.raises(ConversionError, match=message):
        HFCheckpoint(directory, lora=adapter)
