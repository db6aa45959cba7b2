"""DeepSeek V3 and R1, and Kimi-K2 and Moonlight with the same architecture. Source: transformers models/deepseek_v3."""

from __future__ import annotations

from dataclasses import replace

from model_converters.families.parts.description import REFUSED_ROTATIONS, Description
from model_converters.families.parts.experts import (
    expert_sizes,
    mlp_and_expert_rows,
    mtp_pattern,
    sigmoid_routing,
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
from model_converters.families.parts.hf_config import HFConfig, explain_defaults, integer, with_defaults
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
from model_converters.families.parts.mtp import mtp_rows, num_mtp_layers
from model_converters.mapping.table import Row

# Defaults of transformers' DeepseekV3Config for absent fields.
_DEFAULTS = {
    "first_k_dense_replace": 3,
    "n_group": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
}


def _with_defaults(config: HFConfig) -> HFConfig:
    return with_defaults(config, _DEFAULTS, nullable=("num_key_value_heads", "q_lora_rank"))


@explain_defaults(_DEFAULTS)
def _rows(config: HFConfig) -> list[Row]:
    config = _with_defaults(config)
    return [
        *embedding_rows(config, integer(config, "hidden_size")),
        *_layer_rows(config, sparse_pattern(config)),
        *mtp_rows(config, _layer_rows(config, mtp_pattern(config))),
    ]


def _layer_rows(config: HFConfig, pattern: list[bool]) -> list[Row]:
    return [
        *latent_attention_rows(latent_sizes(config), range(len(pattern))),
        *mlp_and_expert_rows(expert_sizes(config), pattern, corrected=True),
    ]


@explain_defaults(_DEFAULTS)
def _model_arguments(config: HFConfig) -> ModelArguments:
    config = _with_defaults(config)
    attention, experts = latent_sizes(config), expert_sizes(config)
    arguments = model_arguments(config, {}, rope_types=("default", "yarn"))
    transformer = {
        **decoder_arguments(config, as_attention_sizes(attention)),
        **latent_attention_arguments(config, attention, arguments.rotary.base),
        **sparse_arguments(experts, sparse_pattern(config), sigmoid_routing(config, experts)),
    }
    return replace(
        arguments,
        transformer=transformer,
        mtp_num_layers=num_mtp_layers(config),
        latent_norm_epsilon=LATENT_NORM_EPSILON,
    )


_COVERS = (
    "latent attention with or without q_lora_rank, yarn with mscale, sigmoid scores with correction bias, expert "
    "groups, shared experts, dense first layers, multi-token prediction (kept by conversions, trained on request)"
)
_REFUSED = {
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    **REFUSED_BY_LATENT_ATTENTION,
    **REFUSED_ROTATIONS,
}
# transformers supports no other routing. Without these fields vLLM uses softmax scores without correction bias, and
# SGLang fails.
_ENGINE_FIELDS = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    rows=_rows,
    model_arguments=_model_arguments,
    architecture="DeepseekV3ForCausalLM",
    engine_values=rotation_for_engines,
    unread_by_engines={"tie_word_embeddings": VLLM},
    own_fields=OWN_FIELDS,
    absent_for_engines=ABSENT_FOR_ENGINES,
    description=Description(models="DeepSeek-V3, R1, Moonlight", covers=_COVERS, refused=_REFUSED, vllm_cpu="runs"),
    engine_fields=_ENGINE_FIELDS,
)
KIMI_K2 = Family(
    "kimi_k2",
    rows=_rows,
    model_arguments=_model_arguments,
    architecture="DeepseekV3ForCausalLM",
    engine_values=rotation_for_engines,
    unread_by_engines={"tie_word_embeddings": VLLM},
    own_fields=OWN_FIELDS,
    absent_for_engines=ABSENT_FOR_ENGINES,
    description=Description(models="Kimi-K2", covers="all of deepseek_v3", refused=_REFUSED, vllm_cpu="runs"),
    engine_fields=_ENGINE_FIELDS,
    transformers_type="deepseek_v3",
)
