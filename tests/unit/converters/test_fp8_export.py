"""FP8 export, read back by transformers and by our reader, and compared with releases."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from model_converters.errors import ConversionError
from model_converters.hf.fp8_export import Fp8Export, exported_config, is_quantised_from
from model_converters.hf.io import HFCheckpoint, HFWriter
from model_converters.hf.quant import FP8, quantise, scale_shape
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.plan import export_plan
from tests.tiny_models import tiny_fields, write_tiny_model
from tests.unit.converters.hf_models import bound_rows, stored

# Multiples of 128, which transformers' dequantisation requires.
SIZES = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 256, "num_hidden_layers": 2}
EXPERTS = {"moe_intermediate_size": 128, "num_experts": 4, "mlp_only_layers": [0]}
MODELS = {"llama": ("llama", {}), "qwen3": ("qwen3", {}), "qwen3_moe": ("qwen3_moe", EXPERTS)}


def plans_of(config, dtype=torch.bfloat16):
    """Return (bound table, plans of whole bfloat16 tensors)."""
    bound = bound_rows(config, dtype)
    return bound, export_plan(bound, TrainLayout(1))


def export(source, target, *, fp8):
    with HFCheckpoint(source) as checkpoint, HFWriter(target, max_shard_bytes=2**18) as writer:
        bound, plans = plans_of(checkpoint.config)
        names = [plan.hf_name for plan in plans]
        chosen = Fp8Export(checkpoint.config, bound)
        plans = chosen.plans(plans) if fp8 else plans
        by_name = {plan.hf_name: plan for plan in plans}
        writer.begin(plans)
        for name in names:
            for item in chosen.encoded(by_name, name, checkpoint.read(name).bfloat16()):
                writer.write(*item)
        writer.finish(source)
    return target


@pytest.fixture(scope="module", params=MODELS)
def exported(request, tmp_path_factory):
    """Directories of a tiny float32 model and of its FP8 export."""
    directory = tmp_path_factory.mktemp("fp8")
    kind, changes = MODELS[request.param]
    source = write_tiny_model(directory / "source", kind, **SIZES, **changes)
    return source, export(source, directory / "out", fp8=True)


def test_fp8_export_values_equal_in_transformers_and_reader(exported):
    _, out = exported
    plain = export(out, out.with_name("plain"), fp8=False)
    assert "quantization_config" not in json.loads((plain / "config.json").read_text())
    assert {value.dtype for value in stored(plain).values()} == {torch.bfloat16}
    theirs, ours = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval() for path in (out, plain))
    values = ours.state_dict()
    assert set(theirs.state_dict()) == set(values)
    for name, value in theirs.state_dict().items():
        assert torch.equal(value, values[name]), name
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        logits = ours(tokens).logits
        assert torch.equal(theirs(tokens).logits, logits)
    assert logits.float().std() > 0.1


def test_fp8_export_quantises_only_projections(exported):
    source, out = exported
    tensors = stored(out)
    config = json.loads((out / "config.json").read_text())
    skipped = config["quantization_config"]["modules_to_not_convert"]
    with HFCheckpoint(source) as checkpoint:
        for name, shape in checkpoint.shapes.items():
            weight = checkpoint.read(name).bfloat16()
            if name.endswith("_proj.weight"):
                assert tensors[name].dtype == FP8
                assert tensors[name + "_scale_inv"].dtype == torch.float32
                assert tuple(tensors[name + "_scale_inv"].shape) == scale_shape(shape, (128, 128))
                assert is_quantised_from(weight, tensors[name], tensors[name + "_scale_inv"])
                assert name.removesuffix(".weight") not in skipped
            else:
                assert torch.equal(tensors[name], weight)
                assert (name.removesuffix(".weight") in skipped) == (len(shape) == 2)


def test_fp8_export_repeated_has_same_bytes(exported, tmp_path):
    _, out = exported
    again = export(out, tmp_path / "again", fp8=True)
    names = {file.name for file in out.iterdir()}
    assert names == {file.name for file in again.iterdir()}
    for name in names:
        assert (again / name).read_bytes() == (out / name).read_bytes(), name


def test_exported_config_matches_tensor_dtypes():
    quantisation = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = tiny_fields("qwen3_moe", torch_dtype="float32", quantization_config=quantisation)
    bound, plans = plans_of(config | {"quantization_config": None})
    plain = {key: value for key, value in config.items() if key != "quantization_config"} | {"torch_dtype": "bfloat16"}
    assert exported_config(config, plans) == plain
    quantised = exported_config(config, Fp8Export(config, bound).plans(plans))
    described = quantised.pop("quantization_config")
    assert quantised == plain
    gates = [f"model.layers.{layer}.mlp.gate" for layer in range(4)]
    assert described == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["model.embed_tokens", *gates, "lm_head"],
    }


def test_fp8_export_plans_divided_weights_whole():
    config = tiny_fields("qwen3_moe")
    bound = bound_rows(config, torch.bfloat16)
    plans = Fp8Export(config, bound).plans(export_plan(bound, TrainLayout(4, tp=2, ep=2)))
    by_name = {plan.hf_name: plan for plan in plans}
    name = "model.layers.0.self_attn.o_proj.weight"
    assert by_name[name].shape == (32, 64)
    assert [(piece.dim, piece.start, piece.length) for piece in by_name[name].pieces] == [(0, 0, 32)]
    assert by_name[name + "_scale_inv"].shape == (1, 1)
    embedding = by_name["model.embed_tokens.weight"]
    assert (embedding.dtype, len(embedding.pieces)) == (torch.bfloat16, 2)


def test_writer_unquantised_fp8_weight_is_rejected(tmp_path):
    config = tiny_fields("qwen3")
    bound, plans = plans_of(config)
    chosen = Fp8Export(config, bound)
    by_name = {plan.hf_name: plan for plan in chosen.plans(plans)}
    name = "model.layers.0.mlp.up_proj.weight"
    with HFWriter(tmp_path / "out") as writer:
        writer.begin(list(by_name.values()))
        with pytest.raises(ConversionError, match=f"{name} is planned in FP8; quantise it"):
            writer.write(by_name[name], by_name[name].pieces[0], torch.ones(48, 32))
        with pytest.raises(ConversionError, match=f"{name}: a tensor with NaN"):
            list(chosen.encoded(by_name, name, torch.full((48, 32), float("nan"))))
        writer.abort()


def test_is_quantised_from_changed_bit_is_false():
    weight = torch.randn(130, 140, generator=torch.Generator().manual_seed(0)).bfloat16()
    codes, scales = quantise(weight)
    assert is_quantised_from(weight, codes, scales)
    assert not is_quantised_from(weight, codes, None)
    assert not is_quantised_from(weight, codes, scales * (1 + 2**-20))
    codes.view(torch.uint8)[129, 139] ^= 1
    assert not is_quantised_from(weight, codes, scales)


HUB = Path(__file__).parents[3].parent / "shared" / "data" / "hf_configs"


@pytest.mark.skipif(not HUB.is_dir(), reason="needs the hub's own config.json files")
def test_fp8_export_unquantised_modules_match_release():
    config = json.loads((HUB / "Qwen--Qwen3-30B-A3B-FP8_config.json").read_text())
    bound, plans = plans_of(config)
    ours = exported_config(config, Fp8Export(config, bound).plans(plans))["quantization_config"]
    theirs = config["quantization_config"]
    # The release also lists norms and we list the embedding; neither is a linear layer.
    kept = {name for name in theirs["modules_to_not_convert"] if not name.endswith("norm")}
    assert set(ours["modules_to_not_convert"]) - {"model.embed_tokens"} == kept
    lists = {"modules_to_not_convert": None}
    assert ours | lists == theirs | lists
