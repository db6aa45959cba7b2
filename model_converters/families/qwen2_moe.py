"""Qwen2-MoE: attention of Qwen2, routed experts, and one shared expert with a gate per token.

Source: transformers models/qwen2_moe.
"""

from __future__ import annotations

from model_converters.families.parts import experts, family, gated_mlp
from model_converters.families.parts.arguments import ModelArguments, TransformerArguments
from model_converters.families.parts.hf_config import COMPUTED, HFConfig, flag, integer, require
from model_converters.families.qwen3_moe import sparse_layers
from model_converters.mapping.table import Row

# Defaults of transformers' Qwen2MoeConfig for absent fields.
_DEFAULTS = {
    "decoder_sparse_step": 1,
    "head_dim": COMPUTED,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 16,
    "qkv_bias": True,
    "shared_expert_intermediate_size": 5632,
}


def _attention(config: HFConfig) -> TransformerArguments:
    # With it, transformers needs a sliding_window.
    require(config, "use_sliding_window", False, reason="every layer attends to all tokens")
    return family.grouped_attention(config, qkv_bias=flag(config, "qkv_bias"))


def _rows(config: HFConfig) -> list[Row]:
    attention, layers = _attention(config), range(integer(config, "num_hidden_layers"))
    hidden, sparse = attention["hidden_size"], sparse_layers(config)
    rows = [
        *family.embedding_rows(config),
        *family.attention_rows(attention, layers),
        *gated_mlp.mlp_rows(config, sorted(set(layers) - set(sparse))),
    ]
    if sparse:
        intermediate, num_experts = integer(config, "moe_intermediate_size"), integer(config, "num_experts")
        rows += experts.expert_rows(hidden, intermediate, num_experts, sparse)
        rows += experts.gated_shared_rows(hidden, integer(config, "shared_expert_intermediate_size"), sparse)
    return rows


def _model_arguments(config: HFConfig) -> ModelArguments:
    transformer = family.decoder_arguments(config, _attention(config))
    sparse = set(sparse_layers(config))
    if sparse:
        intermediate, normalised = integer(config, "moe_intermediate_size"), flag(config, "norm_topk_prob")
        num_experts = integer(config, "num_experts")
        transformer |= experts.softmax_experts(config, num_experts, intermediate, normalised=normalised)
        transformer |= {
            "moe_layer_freq": [int(layer in sparse) for layer in range(transformer["num_layers"])],
            "moe_shared_expert_intermediate_size": integer(config, "shared_expert_intermediate_size"),
            "moe_shared_expert_gate": True,
        }
    return family.model_arguments(config, transformer)


QWEN2_MOE = family.Family(
    "qwen2_moe",
    _rows,
    _model_arguments,
    defaults=_DEFAULTS,
    architecture="Qwen2MoeForCausalLM",
    unread_by_engines={
        "head_dim": family.VLLM | family.SGLANG,
        "qkv_bias": family.VLLM,
        "tie_word_embeddings": family.SGLANG,
    },
    own_fields=frozenset(
        {"decoder_sparse_step", "mlp_only_layers", "qkv_bias", "shared_expert_intermediate_size", "sliding_window"}
    ),
    description=family.Description(
        models="Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
        covers="Qwen2 attention with or without biases on q, k and v, routed experts with or without norm_topk_prob, a "
        "shared expert with a gate, mlp_only_layers, decoder_sparse_step",
        refused={
            "num_experts_per_tok": 1,
            "use_sliding_window": True,
            **family.REFUSED_BY_ATTENTION,
        },
        vllm_cpu="runs",
    ),
)
