"""Qwen2 and Qwen2.5, dense. q, k and v always have biases. Source: transformers models/qwen2."""

from __future__ import annotations

from model_converters.families.parts.description import REFUSED_BY_ATTENTION, REFUSED_ROTATIONS, Description
from model_converters.families.parts.family import (
    SGLANG,
    VLLM,
    Family,
    ModelArguments,
    attention_rows,
    attention_sizes,
    decoder_arguments,
    embedding_rows,
    mlp_rows,
    model_arguments,
    qkv_bias_row,
)
from model_converters.families.parts.hf_config import COMPUTED, HFConfig, explain_defaults, integer, with_defaults
from model_converters.mapping.table import Row

# Defaults of transformers' Qwen2Config for absent fields.
_DEFAULTS = {"head_dim": COMPUTED, "num_key_value_heads": 32}


def _with_defaults(config: HFConfig) -> HFConfig:
    return with_defaults(config, _DEFAULTS, nullable=("num_key_value_heads",))


@explain_defaults(_DEFAULTS)
def _rows(config: HFConfig) -> list[Row]:
    config = _with_defaults(config)
    sizes = attention_sizes(config)
    layers = range(integer(config, "num_hidden_layers"))
    return [
        *embedding_rows(config, sizes.hidden),
        *attention_rows(sizes, layers),
        qkv_bias_row(sizes, layers),
        *mlp_rows(sizes.hidden, integer(config, "intermediate_size"), layers),
    ]


@explain_defaults(_DEFAULTS)
def _model_arguments(config: HFConfig) -> ModelArguments:
    config = _with_defaults(config)
    transformer = dict(decoder_arguments(config, attention_sizes(config)), add_qkv_bias=True, qk_layernorm=False)
    return model_arguments(config, transformer)


QWEN2 = Family(
    "qwen2",
    rows=_rows,
    model_arguments=_model_arguments,
    architecture="Qwen2ForCausalLM",
    unread_by_engines={"head_dim": VLLM | SGLANG},
    own_fields=frozenset({"sliding_window"}),
    description=Description(
        models="Qwen2, Qwen2.5",
        covers="grouped-query attention with biases on q, k and v, tied or untied embeddings",
        refused={"use_sliding_window": True, **REFUSED_BY_ATTENTION, **REFUSED_ROTATIONS},
        vllm_cpu="runs",
    ),
)
