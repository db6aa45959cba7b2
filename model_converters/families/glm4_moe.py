"""GLM-4.5 to GLM-4.7: grouped-query attention with rotation of half of each head, and the experts of DeepSeek V3.

Source: transformers models/glm4_moe.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from model_converters.families.parts import experts, family
from model_converters.families.parts.arguments import ModelArguments, TransformerArguments
from model_converters.families.parts.hf_config import COMPUTED, HFConfig, flag
from model_converters.families.parts.mtp import num_mtp_layers
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


def _attention(config: HFConfig) -> TransformerArguments:
    bias, norm = flag(config, "attention_bias"), flag(config, "use_qk_norm")
    return family.grouped_attention(config, qkv_bias=bias, qk_norm=norm, bias_of_qkv_only=True)


def _layer_rows(config: HFConfig, pattern: list[bool]) -> list[Row]:
    return [
        *family.attention_rows(_attention(config), range(len(pattern))),
        *experts.mlp_and_expert_rows(config, pattern, corrected=True),
    ]


def _model_arguments(config: HFConfig) -> ModelArguments:
    transformer = family.decoder_arguments(config, _attention(config))
    transformer |= experts.sparse_arguments(config, experts.sigmoid_routing(config))
    arguments = family.model_arguments(config, transformer, partial_rotation=True)
    return replace(arguments, mtp_num_layers=num_mtp_layers(config))


GLM4_MOE = family.Family(
    "glm4_moe",
    partial(experts.rows_with_mtp, _layer_rows),
    _model_arguments,
    defaults=_DEFAULTS,
    nullable=("partial_rotary_factor",),  # with null, transformers rotates whole heads
    architecture="Glm4MoeForCausalLM",
    unread_by_engines=dict.fromkeys(("tie_word_embeddings", "moe_layer_freq"), family.VLLM | family.SGLANG),
    description=family.Description(
        models="GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7",
        covers="grouped queries, QKV bias, QK norms, partial rotation, sigmoid scores with correction bias, expert "
        "groups, shared experts, dense first layers, multi-token prediction (kept by conversions, trained on request)",
        refused={
            "norm_topk_prob": False,
            "scoring_func": "softmax",
            "topk_method": "greedy",
            **family.REFUSED_BY_ALL,
            "hidden_act": "gelu",
            "layer_types": ["sliding_attention"],
            "quantization_config": {"quant_method": "gptq"},
            "rope_scaling": {"rope_type": "proportional", "factor": 2.0},
        },
        vllm_cpu="runs",
    ),
)
