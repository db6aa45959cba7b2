"""DeepSeek V2 and V2-Lite: latent attention as in V3, router with softmax scores and without a correction bias.

Source: transformers models/deepseek_v2.
"""

from __future__ import annotations

from model_converters.errors import ConversionError
from model_converters.families.parts import experts, family, mla
from model_converters.families.parts.arguments import ModelArguments, TransformerArguments
from model_converters.families.parts.hf_config import HFConfig, integer, number, require
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


def _rows(config: HFConfig) -> list[Row]:
    require(config, "mlp_bias", False, reason="the table has no row for MLP biases")
    return [
        *family.embedding_rows(config),
        *mla.latent_attention_rows(config, range(integer(config, "num_hidden_layers"))),
        *experts.mlp_and_expert_rows(config, experts.sparse_pattern(config)),
    ]


def _model_arguments(config: HFConfig) -> ModelArguments:
    require(config, "mlp_bias", False, reason="the table has no row for MLP biases")
    return mla.latent_model_arguments(config, experts.sparse_arguments(config, _routing(config)))


def _routing(config: HFConfig) -> TransformerArguments:
    require(config, "scoring_func", "softmax", None, reason="this family's scores are a softmax")
    # If it is true, DeepSeek's own code normalises the weights, but transformers does not.
    require(config, "norm_topk_prob", False, reason="implementations of this family disagree on it")
    method = config.get("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise ConversionError(
            f"config.json: topk_method {method!r} is not supported, only 'greedy' and 'group_limited_greedy'"
        )
    for key in ("n_group", "topk_group"):
        integer(config, key, default=1)
    return {
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": number(config, "routed_scaling_factor", positive=True),
        **(experts.group_limits(config, best_of_group=1) if method == "group_limited_greedy" else {}),
    }


def _engine_values(config: HFConfig) -> dict[str, object]:
    """Return no expert groups if topk_method is greedy: transformers then ignores the groups, and vLLM does not."""
    greedy = config.get("topk_method", "greedy") == "greedy"
    return {key: 1 for key in ("n_group", "topk_group") if greedy and config.get(key, 1) not in (None, 1)}


DEEPSEEK_V2 = family.Family(
    "deepseek_v2",
    _rows,
    _model_arguments,
    defaults=_DEFAULTS,
    nullable=("q_lora_rank",),
    architecture="DeepseekV2ForCausalLM",
    engine_values=_engine_values,
    unread_by_engines={"tie_word_embeddings": family.VLLM},
    own_fields=mla.OWN_FIELDS,
    absent_for_engines=mla.ABSENT_FOR_ENGINES,
    description=family.Description(
        models="DeepSeek-V2-Lite",
        covers="latent attention with or without q_lora_rank, yarn with mscale, softmax scores, shared experts, dense "
        "first layers; expert groups where topk_group is above half of num_experts_per_tok (not DeepSeek-V2: 3 of 6)",
        refused={
            "mlp_bias": True,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            **mla.REFUSED_BY_LATENT_ATTENTION,
        },
        vllm_cpu="runs",
    ),
    # One group means no grouping; vLLM's routing on CPU fails if these are null.
    engine_fields={"n_group": 1, "topk_group": 1, "scoring_func": "softmax", "moe_layer_freq": 1},
)
