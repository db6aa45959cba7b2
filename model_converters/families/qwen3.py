"""Qwen3, dense. Source: transformers models/qwen3."""

from __future__ import annotations

from typing import Any

from model_converters.families.parts.description import REFUSED_BY_ATTENTION, REFUSED_ROTATIONS, Description
from model_converters.families.parts.family import (
    AttentionSizes,
    Family,
    ModelArguments,
    attention_rows,
    attention_sizes,
    decoder_arguments,
    embedding_rows,
    mlp_rows,
    model_arguments,
    qk_norm_rows,
)
from model_converters.families.parts.hf_config import HFConfig, explain_defaults, integer, with_defaults
from model_converters.mapping.table import Row

# Defaults of transformers' Qwen3Config for absent fields. head_dim does not depend on hidden_size.
_DEFAULTS = {"head_dim": 128, "num_key_value_heads": 32}


def _with_defaults(config: HFConfig) -> HFConfig:
    return with_defaults(config, _DEFAULTS, nullable=("num_key_value_heads",))


def qwen3_arguments(config: HFConfig, sizes: AttentionSizes) -> dict[str, Any]:
    """Return the TransformerConfig arguments that all Qwen3 models share."""
    return dict(decoder_arguments(config, sizes), add_qkv_bias=False, qk_layernorm=True)


@explain_defaults(_DEFAULTS)
def _rows(config: HFConfig) -> list[Row]:
    config = _with_defaults(config)
    sizes = attention_sizes(config)
    layers = range(integer(config, "num_hidden_layers"))
    return [
        *embedding_rows(config, sizes.hidden),
        *attention_rows(sizes, layers),
        *qk_norm_rows(sizes.head_dim, layers),
        *mlp_rows(sizes.hidden, integer(config, "intermediate_size"), layers),
    ]


@explain_defaults(_DEFAULTS)
def _model_arguments(config: HFConfig) -> ModelArguments:
    config = _with_defaults(config)
    return model_arguments(config, qwen3_arguments(config, attention_sizes(config)))


QWEN3 = Family(
    "qwen3",
    rows=_rows,
    model_arguments=_model_arguments,
    architecture="Qwen3ForCausalLM",
    own_fields=frozenset({"sliding_window"}),
    description=Description(
        models="Qwen3 0.6B to 32B",
        covers="grouped-query attention with q and k norms, independent head_dim, tied or untied embeddings",
        refused={"use_sliding_window": True, **REFUSED_BY_ATTENTION, **REFUSED_ROTATIONS},
        vllm_cpu="runs",
    ),
)
