"""DeepSeek V3 and R1, and Kimi-K2 and Moonlight with the same architecture. Source: transformers models/deepseek_v3."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from model_converters.families.parts import experts, family, mla
from model_converters.families.parts.arguments import ModelArguments
from model_converters.families.parts.hf_config import HFConfig
from model_converters.families.parts.mtp import num_mtp_layers
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


def layer_rows(config: HFConfig, pattern: list[bool]) -> list[Row]:
    """Return the rows of decoder layers. pattern: see mlp_and_expert_rows."""
    return [
        *mla.latent_attention_rows(config, range(len(pattern))),
        *experts.mlp_and_expert_rows(config, pattern, corrected=True),
    ]


def _model_arguments(config: HFConfig) -> ModelArguments:
    sparse = experts.sparse_arguments(config, experts.sigmoid_routing(config))
    return replace(mla.latent_model_arguments(config, sparse), mtp_num_layers=num_mtp_layers(config))


DEEPSEEK_V3 = family.Family(
    "deepseek_v3",
    partial(experts.rows_with_mtp, layer_rows),
    _model_arguments,
    defaults=_DEFAULTS,
    nullable=("num_key_value_heads", "q_lora_rank"),
    architecture="DeepseekV3ForCausalLM",
    unread_by_engines={"tie_word_embeddings": family.VLLM},
    own_fields=mla.OWN_FIELDS,
    absent_for_engines=mla.ABSENT_FOR_ENGINES,
    description=family.Description(
        models="DeepSeek-V3, R1, Moonlight",
        covers="latent attention with or without q_lora_rank, yarn with mscale, sigmoid scores with correction bias, "
        "expert groups, shared experts, dense first layers, multi-token prediction (kept by conversions, trained on "
        "request)",
        refused={
            "norm_topk_prob": False,
            "scoring_func": "softmax",
            "topk_method": "greedy",
            **mla.REFUSED_BY_LATENT_ATTENTION,
        },
        vllm_cpu="runs",
    ),
    # transformers supports no other routing. Without these fields vLLM uses softmax scores without correction bias, and
    # SGLang fails.
    engine_fields={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
)
KIMI_K2 = replace(
    DEEPSEEK_V3,
    model_type="kimi_k2",
    transformers_type="deepseek_v3",
    description=replace(
        DEEPSEEK_V3.description, models="Kimi-K2, text of K2.5 and K2.6", covers="all of deepseek_v3, INT4 releases"
    ),
)
