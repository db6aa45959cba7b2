"""Llama 2, 3 and 3.1 to 3.3, dense. Source: transformers models/llama."""

from __future__ import annotations

from model_converters.errors import ConversionError
from model_converters.families.parts import family
from model_converters.families.parts.description import REFUSED_BY_ATTENTION, REFUSED_ROTATIONS, Description
from model_converters.families.parts.family import AttentionSizes, Family, ModelArguments
from model_converters.families.parts.hf_config import HFConfig, flag, integer
from model_converters.mapping.table import Row


def _sizes(config: HFConfig) -> AttentionSizes:
    if flag(config, "mlp_bias"):
        raise ConversionError("config.json: mlp_bias is not supported: the table has no row for MLP biases")
    return family.attention_sizes(config)


def _rows(config: HFConfig) -> list[Row]:
    sizes = _sizes(config)
    layers = range(integer(config, "num_hidden_layers"))
    return [
        *family.embedding_rows(config, sizes.hidden),
        *family.attention_rows(sizes, layers),
        *family.mlp_rows(sizes.hidden, integer(config, "intermediate_size"), layers),
    ]


def _model_arguments(config: HFConfig) -> ModelArguments:
    transformer = family.decoder_arguments(config, _sizes(config), qkv_bias=False, qk_norm=False)
    return family.model_arguments(config, transformer, rope_types=("default", "llama3"))


LLAMA = Family(
    "llama",
    _rows,
    _model_arguments,
    architecture="LlamaForCausalLM",
    description=Description(
        models="Llama 2, 3, 3.1 to 3.3",
        covers="grouped-query attention, llama3 rope scaling, tied or untied embeddings",
        refused={"mlp_bias": True, "use_sliding_window": True, **REFUSED_BY_ATTENTION, **REFUSED_ROTATIONS},
        vllm_cpu="runs",
    ),
)
