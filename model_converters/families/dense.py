"""Dense models with grouped-query attention. Source: transformers models/llama, models/qwen2 and models/qwen3."""

from __future__ import annotations

from functools import partial

from model_converters.errors import ConversionError
from model_converters.families.parts import family
from model_converters.families.parts.hf_config import COMPUTED, HFConfig, flag


def _llama(config: HFConfig) -> family.TransformerArguments:
    if flag(config, "mlp_bias"):
        raise ConversionError("config.json: mlp_bias is not supported: the table has no row for MLP biases")
    return family.grouped_attention(config)


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
