"""MiniMax-M2: norms over all heads of queries and keys, partial rotation, and routed experts in every layer.

Source: transformers models/minimax_m2. The tensors have the names of the hub: router and experts are in
block_sparse_moe, w1 is gate, w3 is up, w2 is down. transformers does not read the fields of the release that describe
this architecture (use_qk_norm, use_routing_bias, ...); other values are rejected, because they mean another model. It
has no multi-token-prediction modules either (num_mtp_modules), and their tensors are not published.
"""

from __future__ import annotations

from model_converters.errors import ConversionError
from model_converters.families import mixtral
from model_converters.families.parts import experts, family
from model_converters.families.parts.arguments import ModelArguments, TransformerArguments
from model_converters.families.parts.hf_config import HFConfig, integer, require, whole_numbers
from model_converters.mapping.table import Row

# Field -> value that describes the only architecture of transformers' class.
_FIXED: dict[str, object] = {
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "use_routing_bias": True,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
}


def _attention(config: HFConfig) -> TransformerArguments:
    for key, value in _FIXED.items():
        require(config, key, value, None, reason="transformers' minimax_m2 computes this model, whatever the field is")
    if set(whole_numbers(config, "attn_type_list")) - {1}:
        raise ConversionError("config.json: attn_type_list must contain 1 only, full attention")
    return {**family.grouped_attention(config), "qk_norm_over_heads": True}


def _rows(config: HFConfig) -> list[Row]:
    bias, layers = "block_sparse_moe.e_score_correction_bias", range(integer(config, "num_hidden_layers"))
    return [
        *mixtral.rows(config, _attention(config)),
        experts.correction_row(bias, (mixtral.num_experts(config),), layers),
    ]


def _model_arguments(config: HFConfig) -> ModelArguments:
    transformer = family.decoder_arguments(config, _attention(config))
    intermediate = integer(config, "intermediate_size")
    routed = experts.softmax_experts(config, mixtral.num_experts(config), intermediate, normalised=True)
    transformer |= experts.corrected(routed, "sigmoid")
    return family.model_arguments(_with_fraction(config), transformer, partial_rotation=True)


def _with_fraction(config: HFConfig) -> HFConfig:
    """Return config.json with partial_rotary_factor. Releases have rotary_dim, the number of rotated elements of each
    head, which transformers reads if the factor is absent."""
    if config.get("rotary_dim") is None or "partial_rotary_factor" in config:
        return config
    return {**config, "partial_rotary_factor": integer(config, "rotary_dim") / integer(config, "head_dim")}


def _engine_values(config: HFConfig) -> dict[str, object]:
    """Return rotary_dim for engines, which need it: transformers reads partial_rotary_factor before it."""
    arguments = MINIMAX_M2.model_arguments(config)
    rotated = int(arguments.transformer["kv_channels"] * arguments.rotary.fraction)
    return {"rotary_dim": rotated} if config.get("rotary_dim") != rotated else {}


MINIMAX_M2 = family.Family(
    "minimax_m2",
    _rows,
    _model_arguments,
    defaults={"head_dim": 128, "num_key_value_heads": 8, "rope_theta": 5e6},
    architecture="MiniMaxM2ForCausalLM",
    unread_by_engines={"tie_word_embeddings": family.VLLM | family.SGLANG},
    engine_values=_engine_values,
    description=family.Description(
        models="MiniMax-M2, M2.1, M2.5",
        covers="grouped-query attention with norms over all heads, partial rotation, sigmoid scores with correction "
        "bias",
        refused={
            "num_experts_per_tok": 1,
            **{key: value for key, value in family.REFUSED_BY_ATTENTION.items() if key != "partial_rotary_factor"},
            "use_qk_norm": False,
            "qk_norm_type": "per_head",
            "use_routing_bias": False,
            "scoring_func": "softmax",
            "shared_intermediate_size": 1024,
            "attn_type_list": [0, 1],
        },
        vllm_cpu="runs",
    ),
    # Without these fields vLLM fails or has no correction bias, and SGLang has no norms of queries and keys.
    engine_fields={
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
    },
)
