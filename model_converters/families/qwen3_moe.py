"""Qwen3-MoE: attention of Qwen3, routed experts in the sparse layers. Source: transformers models/qwen3_moe."""

from __future__ import annotations

from model_converters.families.parts import experts, family, gated_mlp
from model_converters.families.parts.arguments import ModelArguments
from model_converters.families.parts.hf_config import COMPUTED, HFConfig, flag, integer, whole_numbers
from model_converters.mapping.table import Row


def sparse_layers(config: HFConfig) -> list[int]:
    """Return the layers with experts; the others have a dense MLP of intermediate_size."""
    dense = set(whole_numbers(config, "mlp_only_layers"))
    step = integer(config, "decoder_sparse_step", default=1)
    layers = range(integer(config, "num_hidden_layers"))
    # The step counts layers from 1.
    return [layer for layer in layers if layer not in dense and (layer + 1) % step == 0]


def _num_experts(config: HFConfig) -> int:
    # The hub's files have num_experts; transformers 5 writes num_local_experts and prefers it if both are present.
    return integer(config, "num_experts", "num_local_experts")


def _rows(config: HFConfig) -> list[Row]:
    attention = family.grouped_attention(config, qk_norm=True)
    layers = range(integer(config, "num_hidden_layers"))
    sparse = sparse_layers(config)
    rows = [
        *family.embedding_rows(config),
        *family.attention_rows(attention, layers),
        *gated_mlp.mlp_rows(config, sorted(set(layers) - set(sparse))),
    ]
    if sparse:
        intermediate = integer(config, "moe_intermediate_size")
        rows += experts.expert_rows(attention["hidden_size"], intermediate, _num_experts(config), sparse)
    return rows


def _model_arguments(config: HFConfig) -> ModelArguments:
    transformer = family.decoder_arguments(config, family.grouped_attention(config, qk_norm=True))
    sparse = set(sparse_layers(config))
    if sparse:
        intermediate, normalised = integer(config, "moe_intermediate_size"), flag(config, "norm_topk_prob")
        transformer |= experts.softmax_experts(config, _num_experts(config), intermediate, normalised=normalised)
        transformer["moe_layer_freq"] = [int(layer in sparse) for layer in range(transformer["num_layers"])]
    return family.model_arguments(config, transformer)


QWEN3_MOE = family.Family(
    "qwen3_moe",
    _rows,
    _model_arguments,
    defaults={"decoder_sparse_step": 1, "head_dim": COMPUTED, "norm_topk_prob": False, "num_key_value_heads": 4},
    architecture="Qwen3MoeForCausalLM",
    unread_by_engines={"tie_word_embeddings": family.SGLANG},
    own_fields=frozenset({"decoder_sparse_step", "mlp_only_layers", "sliding_window"}),
    description=family.Description(
        models="Qwen3-30B-A3B, Qwen3-235B-A22B",
        covers="Qwen3 attention, routed experts with or without norm_topk_prob, mlp_only_layers, decoder_sparse_step",
        refused={
            "num_experts_per_tok": 1,
            "use_sliding_window": True,
            **family.REFUSED_BY_ATTENTION,
        },
        vllm_cpu="runs",
    ),
)
