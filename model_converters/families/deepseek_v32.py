"""DeepSeek-V3.2 and GLM-5: the layers of DeepSeek V3, whose queries attend to the tokens that an indexer chooses.

Source: transformers models/deepseek_v32, models/glm_moe_dsa.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from model_converters.errors import ConversionError
from model_converters.families.deepseek_v3 import DEEPSEEK_V3, layer_rows
from model_converters.families.glm4_moe_lite import listed_dense_layers
from model_converters.families.parts import experts, family, indexer
from model_converters.families.parts.arguments import ModelArguments
from model_converters.families.parts.hf_config import HFConfig, integer, require
from model_converters.mapping.table import Row

# Defaults of transformers' DeepseekV32Config for absent fields; GlmMoeDsaConfig has others for the sizes.
_DEFAULTS = {
    **DEEPSEEK_V3.defaults,
    **indexer.DEFAULTS,
    "index_n_heads": 64,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_GLM_DEFAULTS = {
    "index_n_heads": 32,
    "n_group": 1,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "rms_norm_eps": 1e-5,
    "topk_group": 1,
    "v_head_dim": 256,
}
_NO_KERNEL = (
    "its attention to chosen tokens (index_topk) exists for CUDA only, where the trainer has no kernel for it: that of "
    "megatron-core 0.16.1 rejects packed sequences and rotates the wrong part of released weights (0.20.0 corrects the "
    "rotation)"
)


def num_dense_layers(config: HFConfig) -> int:
    """Return the number of first layers without experts, which transformers reads from mlp_layer_types, and from
    first_k_dense_replace if it is absent.

    Raises: ConversionError as glm4_moe_lite.listed_dense_layers.
    """
    require(config, "moe_layer_freq", 1, None, reason="transformers does not read it")
    if config.get("mlp_layer_types") is not None:
        return listed_dense_layers(config, config["mlp_layer_types"])
    return min(integer(config, "first_k_dense_replace", minimum=0), integer(config, "num_hidden_layers"))


def _as_deepseek(config: HFConfig) -> HFConfig:
    """Return the fields of a DeepSeek V3 with the same layers, except for the indexers."""
    require(config, "mlp_bias", False, reason="the table has no row for MLP biases")
    kinds = config.get("layer_types")
    if kinds is not None and kinds != list(indexer.LAYER_TYPES) * integer(config, "num_hidden_layers"):
        raise ConversionError(
            f"config.json: layer_types must be absent or name {indexer.LAYER_TYPES[0]!r} for each layer, not {kinds!r}"
        )
    known = {key: value for key, value in config.items() if key not in indexer.FIELDS | {"layer_types"}}
    return {**known, "first_k_dense_replace": num_dense_layers(config), "moe_layer_freq": 1}


def _layer_rows(config: HFConfig, pattern: list[bool]) -> list[Row]:
    return [*layer_rows(_as_deepseek(config), pattern), *indexer.index_rows(config, range(len(pattern)))]


def _rows(interleaved: bool, config: HFConfig) -> list[Row]:
    indexer.index_arguments(config, interleaved=interleaved)  # only for its errors
    dense = {"first_k_dense_replace": num_dense_layers(config), "moe_layer_freq": 1}
    return experts.rows_with_mtp(_layer_rows, {**config, **dense})


def _model_arguments(interleaved: bool, config: HFConfig) -> ModelArguments:
    index = indexer.index_arguments(config, interleaved=interleaved)
    arguments = DEEPSEEK_V3.build_arguments(_as_deepseek(config))
    return replace(arguments, transformer={**arguments.transformer, **index})


def _family(model_type: str, architecture: str, models: str, *, defaults: HFConfig, interleaved: bool) -> family.Family:
    refused = {key: value for key, value in DEEPSEEK_V3.description.refused.items() if key != "index_topk"}
    return replace(
        DEEPSEEK_V3,
        model_type=model_type,
        build_rows=partial(_rows, interleaved),
        build_arguments=partial(_model_arguments, interleaved),
        defaults=defaults,
        nullable=(),
        architecture=architecture,
        own_fields=DEEPSEEK_V3.own_fields | {"index_topk"},
        absent_for_engines=DEEPSEEK_V3.absent_for_engines - {"index_topk"},
        refused_by_engines={"vllm": _NO_KERNEL, "sglang": _NO_KERNEL},
        description=family.Description(
            models=models,
            covers="all of deepseek_v3 with q_lora_rank, attention to the tokens chosen by an indexer in each layer; "
            "conversions, `plan`, and supervised training on CPUs without fsdp2, sharded parameters and context "
            "parallelism; no engine",
            refused={
                **refused,
                **indexer.REFUSED,
                "indexer_rope_interleave": not interleaved,
                "layer_types": ["full_attention"],
                "mlp_bias": True,
                "mlp_layer_types": ["sparse", "dense"],
                "q_lora_rank": None,
            },
            vllm_cpu="Sparse Attention is not supported on CPU",
        ),
    )


DEEPSEEK_V32 = _family(
    "deepseek_v32",
    "DeepseekV32ForCausalLM",
    "DeepSeek-V3.2",
    defaults=_DEFAULTS,
    interleaved=False,
)
GLM_MOE_DSA = _family(
    "glm_moe_dsa",
    "GlmMoeDsaForCausalLM",
    "GLM-5",
    defaults=_DEFAULTS | _GLM_DEFAULTS,
    interleaved=True,
)
