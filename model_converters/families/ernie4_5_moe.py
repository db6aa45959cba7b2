"""ERNIE 4.5 with experts (text): rotation of neighbouring elements, and softmax scores with a correction bias.

Source: transformers models/ernie4_5_moe. Releases contain a multi-token-prediction block that transformers does not
read; it is dropped.
"""

from __future__ import annotations

from model_converters.families.parts import experts, family, gated_mlp
from model_converters.families.parts.arguments import ModelArguments, TransformerArguments
from model_converters.families.parts.hf_config import COMPUTED, HFConfig, integer, require
from model_converters.mapping.table import Row

_NORM_MIN = 1e-12
"""Least sum by which routing weights are divided."""


def _attention(config: HFConfig) -> TransformerArguments:
    require(config, "use_bias", False, reason="the table has no rows for the biases of projections")
    return {**family.grouped_attention(config), "rotary_interleaved": True}


def _pattern(config: HFConfig) -> list[bool]:
    """Return for every layer whether it has experts."""
    num_layers, step = integer(config, "num_hidden_layers"), integer(config, "moe_layer_interval")
    first, last = (
        integer(config, "moe_layer_start_index", minimum=0),
        integer(config, "moe_layer_end_index", minimum=-1),
    )
    end = num_layers if last == -1 else last + 1
    # The interval counts layers from 1.
    return [first <= layer < end and (layer + 1) % step == 0 for layer in range(num_layers)]


def _num_experts(config: HFConfig) -> int:
    return integer(config, "moe_num_experts", "num_experts")


def _shared_width(config: HFConfig) -> int:
    """Return the size of the shared experts, which form one MLP; 0 without shared experts."""
    return integer(config, "moe_intermediate_size") * integer(config, "moe_num_shared_experts", minimum=0)


def _rows(config: HFConfig) -> list[Row]:
    attention, pattern = _attention(config), _pattern(config)
    hidden, sparse = attention["hidden_size"], [layer for layer, has_experts in enumerate(pattern) if has_experts]
    rows = [
        *family.embedding_rows(config),
        *family.attention_rows(attention, range(len(pattern))),
        *gated_mlp.mlp_rows(config, [layer for layer, has_experts in enumerate(pattern) if not has_experts]),
    ]
    if not sparse:
        return rows
    num_experts, shared = _num_experts(config), _shared_width(config)
    rows += experts.expert_rows(hidden, integer(config, "moe_intermediate_size"), num_experts, sparse)
    rows.append(experts.correction_row("mlp.moe_statics.e_score_correction_bias", (1, num_experts), sparse))
    if shared:
        prefixes = ("decoder.layers.{l}.mlp.shared_experts.", "model.layers.{l}.mlp.shared_experts.")
        split_by = "moe_num_shared_experts * moe_intermediate_size"
        rows += gated_mlp.gated_rows(prefixes, hidden, shared, sparse, split_by=split_by)
    return rows


def _model_arguments(config: HFConfig) -> ModelArguments:
    transformer, pattern = family.decoder_arguments(config, _attention(config)), _pattern(config)
    if any(pattern):
        require(config, "moe_norm_min", _NORM_MIN, reason="inference engines divide by the sum of the weights itself")
        intermediate, topk_keys = integer(config, "moe_intermediate_size"), ("moe_k", "num_experts_per_tok")
        routed = experts.softmax_experts(
            config, _num_experts(config), intermediate, normalised=True, topk_keys=topk_keys
        )
        transformer |= experts.corrected(routed, "softmax")
        transformer |= {"moe_router_bias_in_row": True, "moe_layer_freq": [int(sparse) for sparse in pattern]}
        if shared := _shared_width(config):
            transformer["moe_shared_expert_intermediate_size"] = shared
    return family.model_arguments(config, transformer)


ERNIE4_5_MOE = family.Family(
    "ernie4_5_moe",
    _rows,
    _model_arguments,
    defaults={
        "head_dim": COMPUTED,
        "moe_k": 6,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "moe_layer_start_index": 1,
        "moe_norm_min": _NORM_MIN,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "tie_word_embeddings": True,
    },
    architecture="Ernie4_5_MoeForCausalLM",
    ignored_tensors=("model.mtp_",),
    refused_by_engines={
        "sglang": "SGLang 0.5.23 keeps the correction bias of routers, and computes their scores, in the model's dtype "
        "instead of float32"
    },
    description=family.Description(
        models="ERNIE-4.5-21B-A3B, ERNIE-4.5-300B-A47B (text)",
        covers="grouped-query attention, rotation of neighbouring elements, softmax scores with correction bias, "
        "shared experts, dense layers (moe_layer_start_index, moe_layer_end_index, moe_layer_interval)",
        refused={"moe_k": 1, "moe_norm_min": 1e-6, "use_bias": True, **family.REFUSED_BY_ATTENTION},
        vllm_cpu="runs",
    ),
)
