"""Unsupported releases: the message names the quantisation method or the rotation field."""

from __future__ import annotations

import json
from itertools import product

import pytest
import torch
from transformers.utils.quantization_config import QuantizationMethod

from model_converters.errors import ConversionError
from model_converters.families import family_for
from model_converters.families.parts.hf_config import fp8_block, read_hf_config
from model_converters.families.parts.rotary import rotary
from model_converters.hf.io import HFCheckpoint
from tests.unit.converters.hf_models import write_hf

METHODS = sorted(
    {method.value for method in QuantizationMethod} - {"fp8", "mxfp4"} | {"modelopt", "nvfp4", "auto-round"}
)


def test_quantisation_methods_of_transformers_are_rejected_by_name(dense_config):
    for method in METHODS:
        quantised = {"quant_method": method, "bits": 4}
        for config in ({"quantization_config": quantised}, {"text_config": {"quantization_config": quantised}}):
            with pytest.raises(ConversionError, match=rf"quantization_config \({method}\) is not supported"):
                fp8_block(dense_config | config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quantization_config": {"load_in_4bit": True}}, r"quantization_config \(bitsandbytes\)"),
        ({"quantization_config": {"quant_algo": "NVFP4"}}, r"quantization_config \(modelopt, NVFP4\)"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}, r"\(modelopt, FP8\)"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}},
            r"quantization_config \(compressed-tensors, nvfp4-pack-quantized\)",
        ),
        ({"quantization": {"bits": 4, "group_size": 64}}, r"json: quantization \(mlx\)"),
        ({"compression_config": {"config_groups": {"a": 1}}}, r"compression_config \(compressed-tensors\)"),
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, r"text_config\.quantization_config"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config \(unknown\)"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"\(fp8\) has no weight_block_size"),
    ],
)
def test_description_without_a_plain_method_is_rejected(config, message, dense_config):
    with pytest.raises(ConversionError, match=message):
        fp8_block(dense_config | config)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}, r"config\.json \(modelopt, NVFP4\)"),
        ("hf_quant_config.json", {"quantization": {"kv_cache_quant_algo": "FP8"}}, r"\(modelopt, FP8\)"),
        ("quantize_config.json", {"bits": 4, "group_size": 128}, r"quantize_config\.json \(gptq\)"),
        ("quant_config.json", {"w_bit": 4}, r"quant_config\.json \(awq\)"),
    ],
)
def test_quantisation_file_beside_config_json_is_rejected(name, content, message, dense_config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dense_config))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": None}}))
    assert read_hf_config(tmp_path) == dense_config
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ConversionError, match=message):
        read_hf_config(tmp_path)


def rejected(config, tensors, directory, message):
    with pytest.raises(ConversionError, match=message):
        HFCheckpoint(write_hf(directory, config, tensors))


def test_tensors_of_a_method_that_config_json_omits_are_named(dense_config, tmp_path):
    for name, method in {
        "q_proj.qweight": "gptq or awq",
        "q_proj.weight.absmax": "bitsandbytes",
        "q_proj.SCB": "bitsandbytes",
        "q_proj.weight_packed": "compressed-tensors",
        "q_proj.weight_scale": "compressed-tensors, quark or fbgemm_fp8",
        "q_proj.weight_scale_2": "modelopt",
        "gate_up_proj_blocks": "mxfp4",
    }.items():
        tensors = {f"model.layers.0.self_attn.{name}": torch.zeros(4, dtype=torch.uint8)}
        rejected(dense_config, tensors, tmp_path, rf"model\.layers\.0\.self_attn\.{name} belongs to {method} weights")


def test_rope_variant_is_rejected_by_its_field(dense_config):
    kinds = ("su", "mrope", "proportional", "ntk", "deepseek_yarn")
    for kind, key, section in product(kinds, ("rope_type", "type"), ("rope_scaling", "rope_parameters")):
        with pytest.raises(ConversionError, match=rf"json: {section}\.{key}: rope type '{kind}' is not supported"):
            rotary(dense_config | {section: {key: kind, "factor": 2.0}}, 4)
    for field in ("mrope_section", "long_factor", "short_factor", "alpha", "attn_factor", "short_mscale"):
        with pytest.raises(ConversionError, match=rf"config\.json: rope_scaling\.{field} \[1\.0\] is not supported"):
            rotary(dense_config | {"rope_scaling": {"rope_type": "default", field: [1.0]}}, 4)


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_experts"])
def test_count_that_would_exhaust_memory_is_rejected(key, moe_config):
    with pytest.raises(ConversionError, match=rf"config\.json: {key} is 1000000000; it must be at most 100000"):
        family_for(moe_config).rows(moe_config | {key: 10**9})
