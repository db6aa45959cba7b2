"""Published models with gated delta nets: parameter counts of the text models, without multi-token prediction.

Sources: config.json of Qwen/Qwen3-Next-80B-A3B-Instruct and Qwen/Qwen3.5-35B-A3B, as in transformers' configuration
classes and slime's scripts/models; slime's scripts/models/qwen3.5-397B-A17B.sh.
"""

from __future__ import annotations

import copy
from math import prod

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from model_converters.families import family_for
from model_converters.families.parts.rotary import RotarySettings

_COMMON: dict[str, object] = {
    "attention_bias": False,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
}
_ROTATION = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
_SECTIONS = {**_ROTATION, "mrope_interleaved": True, "mrope_section": [11, 11, 10]}
_QWEN3_5: dict[str, object] = {
    **_COMMON,
    "model_type": "qwen3_5_moe_text",
    "attn_output_gate": True,
    "mamba_ssm_dtype": "float32",
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "rope_parameters": _SECTIONS,
    "vocab_size": 248320,
}
PUBLISHED: dict[str, dict[str, object]] = {
    "Qwen3-Next-80B-A3B": {
        **_COMMON,
        "model_type": "qwen3_next",
        "decoder_sparse_step": 1,
        "intermediate_size": 5120,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "partial_rotary_factor": 0.25,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "vocab_size": 151936,
    },
    "Qwen3.5-35B-A3B": _QWEN3_5,
    "Qwen3.5-397B-A17B": {
        **_QWEN3_5,
        "hidden_size": 4096,
        "linear_num_value_heads": 64,
        "moe_intermediate_size": 1024,
        "num_attention_heads": 32,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 60,
        "shared_expert_intermediate_size": 1024,
    },
}


BILLIONS = {"Qwen3-Next-80B-A3B": 79.674, "Qwen3.5-35B-A3B": 34.661, "Qwen3.5-397B-A17B": 396.346}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_hybrid_has_parameters_of_transformers(name: str) -> None:
    config = PUBLISHED[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**copy.deepcopy(config)))
    # Not bound to single names: these are many.
    count = sum(
        prod(shape) * max(len(row.layers), 1) * max(row.num_experts, 1)
        for row in family_for(config).rows(config)
        for shape in row.shapes
    )
    assert count == sum(parameter.numel() for parameter in model.parameters())
    assert round(count / 1e9, 3) == BILLIONS[name]
    arguments = family_for(config).model_arguments(config)
    assert arguments.rotary == RotarySettings(1e7, fraction=0.25)
    linear = arguments.transformer["linear_attention_freq"]
    assert linear == [1, 1, 1, 0] * (len(linear) // 4)
