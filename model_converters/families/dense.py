"""Dense models with grouped-query attention. Source: transformers models/llama, qwen2, qwen3 and seed_oss."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from model_converters.errors import ConversionError
from model_converters.families.parts import family
from model_converters.families.parts.arguments import ModelArguments, TransformerArguments
from model_converters.families.parts.hf_config import COMPUTED, HFConfig, flag, number


def _llama(config: HFConfig) -> TransformerArguments:
    _refuse_mlp_bias(config)
    return family.grouped_attention(config)


def _refuse_mlp_bias(config: HFConfig) -> None:
    if flag(config, "mlp_bias"):
        raise ConversionError("config.json: mlp_bias is not supported: the table has no row for MLP biases")


def _seed_oss(config: HFConfig) -> TransformerArguments:
    _refuse_mlp_bias(config)
    if flag(config, "attention_out_bias"):
        raise ConversionError("config.json: attention_out_bias is not supported: the table has no row for o_proj.bias")
    return family.grouped_attention(config, qkv_bias=flag(config, "attention_bias"), bias_of_qkv_only=True)


def _seed_oss_arguments(config: HFConfig) -> ModelArguments:
    arguments = family.dense_arguments(_seed_oss, config)
    # Applied to the outputs of attention and MLP, like Megatron's; updates run without dropout.
    dropout: TransformerArguments = {"hidden_dropout": number(config, "residual_dropout")}
    return replace(arguments, transformer=arguments.transformer | dropout)


# q, k and v of Qwen2 always have biases.
_qwen2 = partial(family.grouped_attention, qkv_bias=True)
_qwen3 = partial(family.grouped_attention, qk_norm=True)

LLAMA = family.Family(
    "llama",
    partial(family.dense_rows, _llama),
    partial(family.dense_arguments, _llama),
    architecture="LlamaForCausalLM",
    description=family.Description(
        models="Llama 2, 3, 3.1 to 3.3",
        covers="grouped-query attention, tied or untied embeddings",
        refused={
            "mlp_bias": True,
            "use_sliding_window": True,
            **family.REFUSED_BY_ATTENTION,
        },
        vllm_cpu="runs",
    ),
)
QWEN2 = family.Family(
    "qwen2",
    partial(family.dense_rows, _qwen2),
    partial(family.dense_arguments, _qwen2),
    defaults={"head_dim": COMPUTED, "num_key_value_heads": 32},
    nullable=("num_key_value_heads",),
    architecture="Qwen2ForCausalLM",
    # Both engines compute head_dim as hidden_size / num_attention_heads.
    unread_by_engines={"head_dim": family.VLLM | family.SGLANG},
    own_fields=frozenset({"sliding_window"}),
    description=family.Description(
        models="Qwen2, Qwen2.5",
        covers="grouped-query attention with biases on q, k and v, tied or untied embeddings",
        refused={"use_sliding_window": True, **family.REFUSED_BY_ATTENTION},
        vllm_cpu="runs",
    ),
)
QWEN3 = family.Family(
    "qwen3",
    partial(family.dense_rows, _qwen3),
    partial(family.dense_arguments, _qwen3),
    # Unlike in other families, the default of head_dim does not depend on hidden_size.
    defaults={"head_dim": 128, "num_key_value_heads": 32},
    nullable=("num_key_value_heads",),
    architecture="Qwen3ForCausalLM",
    own_fields=frozenset({"sliding_window"}),
    description=family.Description(
        models="Qwen3 0.6B to 32B",
        covers="grouped-query attention with q and k norms, independent head_dim, tied or untied embeddings",
        refused={"use_sliding_window": True, **family.REFUSED_BY_ATTENTION},
        vllm_cpu="runs",
    ),
)
SEED_OSS = family.Family(
    "seed_oss",
    partial(family.dense_rows, _seed_oss),
    _seed_oss_arguments,
    defaults={
        "attention_bias": True,
        "attention_dropout": 0.1,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "residual_dropout": 0.1,
    },
    nullable=("head_dim", "num_key_value_heads"),
    architecture="SeedOssForCausalLM",
    description=family.Description(
        models="Seed-OSS-36B",
        covers="grouped-query attention with or without biases on q, k and v, independent head_dim",
        refused={
            "attention_out_bias": True,
            "mlp_bias": True,
            "use_sliding_window": True,
            **{key: value for key, value in family.REFUSED_BY_ATTENTION.items() if key != "attention_bias"},
        },
        vllm_cpu="runs",
    ),
)
