"""Qwen3-MoE: attention of Qwen3, routed experts in the sparse layers. Source: transformers models/qwen3_moe."""

from __future__ import annotations

from model_converters.families.parts.description import REFUSED_BY_ATTENTION, REFUSED_ROTATIONS, Description
from model_converters.families.parts.family import (
    SGLANG,
    Family,
    ModelArguments,
    attention_rows,
    attention_sizes,
    embedding_rows,
    expert_rows,
    mlp_rows,
    model_arguments,
    qk_norm_rows,
    softmax_routing,
)
from model_converters.families.parts.hf_config import (
    COMPUTED,
    HFConfig,
    explain_defaults,
    flag,
    integer,
    whole_numbers,
    with_defaults,
)
from model_converters.families.qwen3 import qwen3_arguments
from model_converters.mapping.table import Row

# Defaults of transformers' Qwen3MoeConfig for absent fields.
_DEFAULTS = {"decoder_sparse_step": 1, "head_dim": COMPUTED, "norm_topk_prob": False, "num_key_value_heads": 4}


def sparse_layers(config: HFConfig) -> list[int]:
    """Return the layers with experts; the others have a dense MLP of intermediate_size."""
    dense = set(whole_numbers(config, "mlp_only_layers"))
    step = integer(config, "decoder_sparse_step", default=1)
    layers = range(integer(config, "num_hidden_layers"))
    return [layer for layer in layers if layer not in dense and (layer + 1) % step == 0]


def _num_experts(config: HFConfig) -> int:
    # The hub's files have num_experts; transformers 5 writes num_local_experts and prefers it if both are present.
    return integer(config, "num_experts", "num_local_experts")


@explain_defaults(_DEFAULTS)
def _rows(config: HFConfig) -> list[Row]:
    config = with_defaults(config, _DEFAULTS)
    sizes = attention_sizes(config)
    layers = range(integer(config, "num_hidden_layers"))
    sparse = sparse_layers(config)
    dense = [layer for layer in layers if layer not in set(sparse)]
    rows = [
        *embedding_rows(config, sizes.hidden),
        *attention_rows(sizes, layers),
        *qk_norm_rows(sizes.head_dim, layers),
    ]
    if dense:
        rows += mlp_rows(sizes.hidden, integer(config, "intermediate_size"), dense)
    if sparse:
        rows += expert_rows(sizes.hidden, integer(config, "moe_intermediate_size"), _num_experts(config), sparse)
    return rows


@explain_defaults(_DEFAULTS)
def _model_arguments(config: HFConfig) -> ModelArguments:
    config = with_defaults(config, _DEFAULTS)
    transformer = qwen3_arguments(config, attention_sizes(config))
    sparse = set(sparse_layers(config))
    if sparse:
        transformer |= _expert_arguments(config)
        transformer["moe_layer_freq"] = [int(layer in sparse) for layer in range(transformer["num_layers"])]
    return model_arguments(config, transformer)


def _expert_arguments(config: HFConfig) -> dict[str, object]:
    num_experts = _num_experts(config)
    return {
        "num_moe_experts": num_experts,
        "moe_ffn_hidden_size": integer(config, "moe_intermediate_size"),
        **softmax_routing(config, num_experts, normalised=flag(config, "norm_topk_prob")),
    }


QWEN3_MOE = Family(
    "qwen3_moe",
    rows=_rows,
    model_arguments=_model_arguments,
    architecture="Qwen3MoeForCausalLM",
    unread_by_engines={"tie_word_embeddings": SGLANG},
    own_fields=frozenset({"sliding_window"}),
    description=Description(
        models="Qwen3-30B-A3B, Qwen3-235B-A22B",
        covers="Qwen3 attention, routed experts with or without norm_topk_prob, mlp_only_layers, decoder_sparse_step",
        refused={"num_experts_per_tok": 1, "use_sliding_window": True, **REFUSED_BY_ATTENTION, **REFUSED_ROTATIONS},
        vllm_cpu="runs",
    ),
)
