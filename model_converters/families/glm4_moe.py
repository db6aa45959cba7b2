"""GLM-4.5 and GLM-4.6: grouped-query attention with rotation of half of each head, and the experts of DeepSeek V3.

Source: transformers models/glm4_moe.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from model_converters.families.parts.description import REFUSED_BY_ALL, Description
from model_converters.families.parts.experts import (
    expert_sizes,
    mlp_and_expert_rows,
    mtp_pattern,
    sigmoid_routing,
    sparse_arguments,
    sparse_pattern,
)
from model_converters.families.parts.family import (
    SGLANG,
    VLLM,
    AttentionSizes,
    Family,
    ModelArguments,
    attention_rows,
    attention_sizes,
    decoder_arguments,
    embedding_rows,
    model_arguments,
    qk_norm_rows,
    qkv_bias_row,
)
from model_converters.families.parts.hf_config import COMPUTED, HFConfig, explain_defaults, flag, integer, with_defaults
from model_converters.families.parts.mtp import mtp_rows, num_mtp_layers
from model_converters.families.parts.rotary import rope_section
from model_converters.mapping.table import Row

# Defaults of transformers' Glm4MoeConfig for absent fields.
_DEFAULTS = {
    "first_k_dense_replace": 1,
    "head_dim": COMPUTED,
    "n_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
}


def _with_defaults(config: HFConfig) -> HFConfig:
    # With null, transformers rotates whole heads.
    return with_defaults(config, _DEFAULTS, nullable=("partial_rotary_factor",))


def _sizes(config: HFConfig) -> AttentionSizes:
    return attention_sizes(config, bias_of_qkv_only=True)


@explain_defaults(_DEFAULTS)
def _rows(config: HFConfig) -> list[Row]:
    config = _with_defaults(config)
    return [
        *embedding_rows(config, integer(config, "hidden_size")),
        *_layer_rows(config, sparse_pattern(config)),
        *mtp_rows(config, _layer_rows(config, mtp_pattern(config))),
    ]


def _layer_rows(config: HFConfig, pattern: list[bool]) -> list[Row]:
    sizes, layers = _sizes(config), range(len(pattern))
    return [
        *attention_rows(sizes, layers),
        *([qkv_bias_row(sizes, layers)] if flag(config, "attention_bias") else []),
        *(qk_norm_rows(sizes.head_dim, layers) if flag(config, "use_qk_norm") else []),
        *mlp_and_expert_rows(expert_sizes(config), pattern, corrected=True),
    ]


@explain_defaults(_DEFAULTS)
def _model_arguments(config: HFConfig) -> ModelArguments:
    config = _with_defaults(config)
    experts = expert_sizes(config)
    transformer: dict[str, Any] = {
        **decoder_arguments(config, _sizes(config)),
        "add_qkv_bias": flag(config, "attention_bias"),
        "qk_layernorm": flag(config, "use_qk_norm"),
        **sparse_arguments(experts, sparse_pattern(config), sigmoid_routing(config, experts)),
    }
    arguments = model_arguments(config, transformer, partial_rotation=True)
    return replace(arguments, mtp_num_layers=num_mtp_layers(config))


def _engine_values(config: HFConfig) -> dict[str, Any]:
    """Return the rotation for engines if partial_rotary_factor is null: transformers rotates whole heads, vLLM half."""
    if config.get("partial_rotary_factor", 0.5) is not None:
        return {}
    return {"rope_parameters": {"partial_rotary_factor": 1.0, **rope_section(config)[1]}}


GLM4_MOE = Family(
    "glm4_moe",
    rows=_rows,
    model_arguments=_model_arguments,
    architecture="Glm4MoeForCausalLM",
    unread_by_engines={"tie_word_embeddings": VLLM | SGLANG, "moe_layer_freq": VLLM | SGLANG},
    engine_values=_engine_values,
    description=Description(
        models="GLM-4.5, GLM-4.5-Air, GLM-4.6",
        covers="grouped queries, QKV bias, QK norms, partial rotation, sigmoid scores with correction bias, expert "
        "groups, shared experts, dense first layers, multi-token prediction (kept by conversions, trained on request)",
        refused={
            "norm_topk_prob": False,
            "scoring_func": "softmax",
            "topk_method": "greedy",
            **REFUSED_BY_ALL,
            "hidden_act": "gelu",
            "layer_types": ["sliding_attention"],
            "quantization_config": {"quant_method": "gptq"},
            "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
        },
        vllm_cpu="runs",
    ),
)
