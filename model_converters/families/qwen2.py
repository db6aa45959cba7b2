"""Qwen2 and Qwen2.5, dense. q, k and v always have biases. Source: transformers models/qwen2."""

from __future__ import annotations

from model_converters.families.parts import family
from model_converters.families.parts.description import REFUSED_BY_ATTENTION, REFUSED_ROTATIONS, Description
from model_converters.families.parts.family import SGLANG, VLLM, Family, ModelArguments
from model_converters.families.parts.hf_config import COMPUTED, HFConfig, integer
from model_converters.mapping.table import Row


def _rows(config: HFConfig) -> list[Row]:
    sizes = family.attention_sizes(config)
    layers = range(integer(config, "num_hidden_layers"))
    return [
        *family.embedding_rows(config, sizes.hidden),
        *family.attention_rows(sizes, layers),
        family.qkv_bias_row(sizes, layers),
        *family.mlp_rows(sizes.hidden, integer(config, "intermediate_size"), layers),
    ]


def _model_arguments(config: HFConfig) -> ModelArguments:
    sizes = family.attention_sizes(config)
    return family.model_arguments(config, family.decoder_arguments(config, sizes, qkv_bias=True, qk_norm=False))


QWEN2 = Family(
    "qwen2",
    _rows,
    _model_arguments,
    defaults={"head_dim": COMPUTED, "num_key_value_heads": 32},
    nullable=("num_key_value_heads",),
    architecture="Qwen2ForCausalLM",
    # Both engines compute head_dim as hidden_size / num_attention_heads.
    unread_by_engines={"head_dim": VLLM | SGLANG},
    own_fields=frozenset({"sliding_window"}),
    description=Description(
        models="Qwen2, Qwen2.5",
        covers="grouped-query attention with biases on q, k and v, tied or untied embeddings",
        refused={"use_sliding_window": True, **REFUSED_BY_ATTENTION, **REFUSED_ROTATIONS},
        vllm_cpu="runs",
    ),
)
