"""Qwen3-Next: gated delta nets and gated attention, routed experts and a gated shared expert.

config.json of the releases does not count their multi-token-prediction layer (tensors mtp.*), which is therefore
dropped; num_nextn_predict_layers 1 keeps it. Source: transformers models/qwen3_next.
"""

from __future__ import annotations

from model_converters.families.parts import delta_net, family
from model_converters.families.parts.arguments import ModelArguments
from model_converters.families.parts.hf_config import HFConfig, flag, integer
from model_converters.families.parts.hybrid import SHARED_EXPERT, hybrid_arguments, hybrid_table
from model_converters.families.qwen3_moe import sparse_layers
from model_converters.mapping.table import Row


def _sparse(config: HFConfig) -> list[bool]:
    layers = set(sparse_layers(config))
    return [layer in layers for layer in range(integer(config, "num_hidden_layers"))]


def _rows(config: HFConfig) -> list[Row]:
    return hybrid_table(config, _sparse(config), separate=False)


def _model_arguments(config: HFConfig) -> ModelArguments:
    return hybrid_arguments(config, _sparse(config), normalised=flag(config, "norm_topk_prob"))


QWEN3_NEXT = family.Family(
    "qwen3_next",
    _rows,
    _model_arguments,
    defaults={**delta_net.DEFAULTS, "decoder_sparse_step": 1, "norm_topk_prob": True, "num_key_value_heads": 2},
    architecture="Qwen3NextForCausalLM",
    own_fields=SHARED_EXPERT | {"decoder_sparse_step", "mlp_only_layers"},
    description=family.Description(
        models="Qwen3-Next-80B-A3B",
        covers="gated delta nets, grouped queries with QK norms and output gate, partial rotation, zero-centred norms, "
        "routed experts, gated shared expert, multi-token prediction (kept by conversions and trained on request)",
        refused={**delta_net.REFUSED, "num_experts_per_tok": 1},
        vllm_cpu="runs",
    ),
)
