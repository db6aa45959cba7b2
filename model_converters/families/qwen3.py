"""Qwen3, dense. Source: transformers models/qwen3."""

from __future__ import annotations

from model_converters.families.parts import family
from model_converters.families.parts.description import REFUSED_BY_ATTENTION, REFUSED_ROTATIONS, Description
from model_converters.families.parts.family import Family, ModelArguments
from model_converters.families.parts.hf_config import HFConfig, integer
from model_converters.mapping.table import Row


def _rows(config: HFConfig) -> list[Row]:
    sizes = family.attention_sizes(config)
    layers = range(integer(config, "num_hidden_layers"))
    return [
        *family.embedding_rows(config, sizes.hidden),
        *family.attention_rows(sizes, layers),
        *family.qk_norm_rows(sizes.head_dim, layers),
        *family.mlp_rows(sizes.hidden, integer(config, "intermediate_size"), layers),
    ]


def _model_arguments(config: HFConfig) -> ModelArguments:
    sizes = family.attention_sizes(config)
    return family.model_arguments(config, family.decoder_arguments(config, sizes, qkv_bias=False, qk_norm=True))


QWEN3 = Family(
    "qwen3",
    _rows,
    _model_arguments,
    # Unlike in other families, the default of head_dim does not depend on hidden_size.
    defaults={"head_dim": 128, "num_key_value_heads": 32},
    nullable=("num_key_value_heads",),
    architecture="Qwen3ForCausalLM",
    own_fields=frozenset({"sliding_window"}),
    description=Description(
        models="Qwen3 0.6B to 32B",
        covers="grouped-query attention with q and k norms, independent head_dim, tied or untied embeddings",
        refused={"use_sliding_window": True, **REFUSED_BY_ATTENTION, **REFUSED_ROTATIONS},
        vllm_cpu="runs",
    ),
)
