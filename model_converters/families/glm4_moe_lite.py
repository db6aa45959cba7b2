"""GLM-4.7-Flash: the layers of DeepSeek V3 with a list of the layers that have experts.

Source: transformers models/glm4_moe_lite.
"""

from __future__ import annotations

from dataclasses import replace

from model_converters.errors import ConversionError
from model_converters.families.deepseek_v3 import DEEPSEEK_V3
from model_converters.families.parts.arguments import ModelArguments
from model_converters.families.parts.hf_config import HFConfig, integer, require
from model_converters.mapping.table import Row

# Defaults of transformers' Glm4MoeLiteConfig for absent fields.
_DEFAULTS = {
    "kv_lora_rank": 512,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 20,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 1.8,
    "topk_group": 1,
    "v_head_dim": 256,
}


def num_dense_layers(config: HFConfig) -> int:
    """Return the number of first layers without experts. transformers reads them from mlp_layer_types, engines from
    first_k_dense_replace.

    Raises: ConversionError as listed_dense_layers, or if the two fields differ.
    """
    types = config.get("mlp_layer_types")
    count = 1 if types is None else listed_dense_layers(config, types)
    reason = f"transformers builds {count} layers without experts (mlp_layer_types, by default the first layer)"
    require(config, "first_k_dense_replace", count, None, reason=reason)
    require(config, "moe_layer_freq", 1, None, reason="transformers does not read it")
    return count


def listed_dense_layers(config: HFConfig, types: object) -> int:
    """Return the number of first layers without experts in the list mlp_layer_types.

    Raises: ConversionError if it is no such list, or if a layer without experts follows one with experts.
    """
    num_layers = integer(config, "num_hidden_layers")
    if not isinstance(types, list | tuple) or not {"dense", "sparse"}.issuperset(map(str, types)):
        raise ConversionError(f"config.json: mlp_layer_types is {types!r}; it must be a list of 'dense' and 'sparse'")
    count = types.count("dense")
    if list(types) != ["dense"] * count + ["sparse"] * (num_layers - count):
        raise ConversionError(
            f"config.json: mlp_layer_types must name all {num_layers} layers, those without experts first: inference "
            "engines read only their number (first_k_dense_replace)"
        )
    return count


def _as_deepseek(config: HFConfig) -> HFConfig:
    return {**config, "first_k_dense_replace": num_dense_layers(config), "moe_layer_freq": 1}


def _rows(config: HFConfig) -> list[Row]:
    return DEEPSEEK_V3.build_rows(_as_deepseek(config))


def _model_arguments(config: HFConfig) -> ModelArguments:
    return DEEPSEEK_V3.build_arguments(_as_deepseek(config))


def _engine_values(config: HFConfig) -> dict[str, object]:
    """Return the fields from which engines read the layers with experts."""
    layers: dict[str, object] = {"first_k_dense_replace": num_dense_layers(config), "moe_layer_freq": 1}
    return DEEPSEEK_V3.engine_values(config) | {key: value for key, value in layers.items() if config.get(key) != value}


GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    build_rows=_rows,
    build_arguments=_model_arguments,
    defaults=_DEFAULTS,
    nullable=("q_lora_rank",),
    architecture="Glm4MoeLiteForCausalLM",
    engine_values=_engine_values,
    description=replace(
        DEEPSEEK_V3.description,
        models="GLM-4.7-Flash",
        covers="all of deepseek_v3, mlp_layer_types whose dense layers are the first ones",
        refused={**DEEPSEEK_V3.description.refused, "mlp_layer_types": ["sparse", "dense"]},
    ),
)
