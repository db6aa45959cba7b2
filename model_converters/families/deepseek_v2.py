"""DeepSeek V2 and V2-Lite: attention of V3, softmax scores without a correction bias.

Source: transformers models/deepseek_v2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from model_converters.errors import ConversionError
from model_converters.families.parts.description import REFUSED_ROTATIONS, Description
from model_converters.families.parts.experts import (
    ExpertSizes,
    expert_sizes,
    group_limits,
    mlp_and_expert_rows,
    scaling_factor,
    sparse_arguments,
    sparse_pattern,
)
from model_converters.families.parts.family import (
    VLLM,
    Family,
    ModelArguments,
    decoder_arguments,
    embedding_rows,
    model_arguments,
)
from model_converters.families.parts.hf_config import HFConfig, explain_defaults, integer, require, with_defaults
from model_converters.families.parts.mla import (
    ABSENT_FOR_ENGINES,
    LATENT_NORM_EPSILON,
    OWN_FIELDS,
    REFUSED_BY_LATENT_ATTENTION,
    as_attention_sizes,
    latent_attention_arguments,
    latent_attention_rows,
    latent_sizes,
    rotation_for_engines,
)
from model_converters.mapping.table import Row

# Defaults of transformers' DeepseekV2Config for absent fields.
_DEFAULTS = {
    "first_k_dense_replace": 0,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
}


def _with_defaults(config: HFConfig) -> HFConfig:
    return with_defaults(config, _DEFAULTS, nullable=("q_lora_rank",))


@explain_defaults(_DEFAULTS)
def _rows(config: HFConfig) -> list[Row]:
    config = _with_defaults(config)
    attention, experts = latent_sizes(config), expert_sizes(config)
    require(config, "mlp_bias", False, reason="the table has no row for MLP biases")
    layers = range(integer(config, "num_hidden_layers"))
    return [
        *embedding_rows(config, attention.hidden),
        *latent_attention_rows(attention, layers),
        *mlp_and_expert_rows(experts, sparse_pattern(config)),
    ]


@explain_defaults(_DEFAULTS)
def _model_arguments(config: HFConfig) -> ModelArguments:
    config = _with_defaults(config)
    attention, experts = latent_sizes(config), expert_sizes(config)
    require(config, "mlp_bias", False, reason="the table has no row for MLP biases")
    arguments = model_arguments(config, {}, rope_types=("default", "yarn"))
    transformer = {
        **decoder_arguments(config, as_attention_sizes(attention)),
        **latent_attention_arguments(config, attention, arguments.rotary.base),
        **sparse_arguments(experts, sparse_pattern(config), _routing(config, experts)),
    }
    return replace(arguments, transformer=transformer, latent_norm_epsilon=LATENT_NORM_EPSILON)


def _routing(config: HFConfig, sizes: ExpertSizes) -> dict[str, Any]:
    require(config, "scoring_func", "softmax", None, reason="this family's scores are a softmax")
    # With true, DeepSeek's own code normalises the weights and transformers does not.
    require(config, "norm_topk_prob", False, reason="implementations of this family disagree on it")
    method = config.get("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise ConversionError(
            f"config.json: topk_method {method!r} is not supported, only 'greedy' and 'group_limited_greedy'"
        )
    for key in ("n_group", "topk_group"):
        integer(config, key, default=1)
    limits = group_limits(config, sizes, best_of_group=1) if method == "group_limited_greedy" else {}
    return {
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": scaling_factor(config),
        **limits,
    }


def _engine_values(config: HFConfig) -> dict[str, Any]:
    """Return overrides that disable expert groups for greedy topk_method: transformers ignores them, vLLM does not."""
    greedy = config.get("topk_method", "greedy") == "greedy"
    groups = {key: 1 for key in ("n_group", "topk_group") if greedy and config.get(key, 1) not in (None, 1)}
    return groups | rotation_for_engines(config)


DEEPSEEK_V2 = Family(
    "deepseek_v2",
    rows=_rows,
    model_arguments=_model_arguments,
    architecture="DeepseekV2ForCausalLM",
    engine_values=_engine_values,
    unread_by_engines={"tie_word_embeddings": VLLM},
    own_fields=OWN_FIELDS,
    absent_for_engines=ABSENT_FOR_ENGINES,
    description=Description(
        models="DeepSeek-V2-Lite",
        covers="latent attention with or without q_lora_rank, yarn with mscale, softmax scores, shared experts, dense "
        "first layers; expert groups where topk_group is above half of num_experts_per_tok (not DeepSeek-V2: 3 of 6)",
        refused={
            "mlp_bias": True,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            **REFUSED_BY_LATENT_ATTENTION,
            **REFUSED_ROTATIONS,
        },
        vllm_cpu="runs",
    ),
    # One group means no grouping; vLLM's routing on CPU fails if these are null.
    engine_fields={"n_group": 1, "topk_group": 1, "scoring_func": "softmax", "moe_layer_freq": 1},
)
