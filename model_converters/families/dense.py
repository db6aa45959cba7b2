"""Dense models with grouped-query attention. Source: transformers models/llama, models/qwen2 and models/qwen3."""

from __future__ import annotations

from functools import partial

from model_converters.errors import ConversionError
from model_converters.families.parts.description import REFUSED_BY_ATTENTION, REFUSED_ROTATIONS, Description
from model_converters.families.parts.family import (
    SGLANG,
    VLLM,
    Family,
    GroupedAttention,
    dense_arguments,
    dense_rows,
    grouped_attention,
)
from model_converters.families.parts.hf_config import COMPUTED, HFConfig, flag


def _llama(config: HFConfig) -> GroupedAttention:
    if flag(config, "mlp_bias"):
        raise ConversionError("config.json: mlp_bias is not supported: the table has no row for MLP biases")
    return grouped_attention(config)


# q, k and v of Qwen2 always have biases.
_qwen2 = partial(grouped_attention, qkv_bias=True)
_qwen3 = partial(grouped_attention, qk_norm=True)

LLAMA = Family(
    "llama",
    partial(dense_rows, _llama),
    partial(dense_arguments, _llama, rope_types=("default", "llama3")),
    architecture="LlamaForCausalLM",
    description=Description(
        models="Llama 2, 3, 3.1 to 3.3",
        covers="grouped-query attention, llama3 rope scaling, tied or untied embeddings",
        refused={"mlp_bias": True, "use_sliding_window": True, **REFUSED_BY_ATTENTION, **REFUSED_ROTATIONS},
        vllm_cpu="runs",
    ),
)
QWEN2 = Family(
    "qwen2",
    partial(dense_rows, _qwen2),
    partial(dense_arguments, _qwen2),
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
QWEN3 = Family(
    "qwen3",
    partial(dense_rows, _qwen3),
    partial(dense_arguments, _qwen3),
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
