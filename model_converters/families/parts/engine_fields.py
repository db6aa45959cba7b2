"""Fields of config.json that vLLM or SGLang read, but transformers does not use for a family.

A run overrides such a field for its engine, with the value that computes the trained model, or rejects it by name.
tests/contract/test_engine_fields.py lists all fields that the engines' sources read, and fails for a field that is
neither handled here nor used by transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from model_converters.errors import ConversionError
from model_converters.families.parts.engine_rotation import refuse_rotation
from model_converters.families.parts.family import Family
from model_converters.families.parts.hf_config import ConfigWithDefaults, HFConfig, integer, number


@dataclass(frozen=True)
class NeutralSize:
    """Neutral value that equals a size of the model: the argument `name` of Megatron's TransformerConfig."""

    name: Literal["num_query_groups", "num_attention_heads"]


class NeutralRotation:
    """Neutral value that states the kind of rotation: False if it pairs neighbouring elements of a head."""


NEUTRAL: HFConfig = {
    # Attention to a window or chunk of the tokens.
    **dict.fromkeys(("sliding_window", "sliding_window_size", "window_size", "attention_chunk_size", "rswa_window")),
    "hybrid_layer_pattern": None,
    "is_hybrid_swa": False,
    # Scaling, capping or another dtype of logits.
    **dict.fromkeys(("logit_scale", "scale_emb"), 1.0),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping", "llama_4_scaling", "head_dtype")),
    **dict.fromkeys(("enable_lm_head_fp32", "enable_lm_head_output_fp32"), False),
    # Additional parameters.
    **dict.fromkeys(("bias", "qkv_bias", "qk_norm", "use_ngram_embedding"), False),
    "shared_expert_intermediate_size": 0,
    # Layers without experts, of the families that have no other kind of layers.
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    # Other names for sizes, and sizes that differ between layers.
    **dict.fromkeys(("n_head_kv", "num_kv_heads"), NeutralSize("num_query_groups")),
    "original_num_attention_heads": NeutralSize("num_attention_heads"),
    "multi_query": False,
    **dict.fromkeys(("num_attention_heads_per_layer", "hidden_size_per_head", "block_configs")),
    **dict.fromkeys(("v_head_dim", "swa_head_dim", "swa_v_head_dim")),
    **dict.fromkeys(("loop_num", "num_loops", "hc_mult"), 1),
    # Other names for rotary settings, and rotations of multimodal models.
    "rope_is_neox_style": NeutralRotation(),
    **dict.fromkeys(("rotary_pct", "rotary_emb_fraction", "rotary_emb_base", "mrope_section", "xdrope_section")),
    # Clamped activations, another choice of experts and another dtype of routers. 2 is SGLang's name of its default.
    "swiglu_limit": None,
    "num_hash_layers": 0,
    "use_moe": True,
    "router_fp32": False,
    "routing_method_type": 2,
    # Models that are not causal decoders with full attention.
    **dict.fromkeys(("is_encoder_decoder", "use_bidirectional_attention", "is_mm_prefix_lm"), False),
    **dict.fromkeys(("canvas_length", "index_topk", "compress_ratios")),
}
"""Field -> value with which an engine that reads it computes the model of transformers. Does not apply to a family's
`own_fields`."""

SUBMODELS = (
    *("text_config", "llm_config", "thinker_config", "vision_config", "audio_config", "sound_config"),
    *("decoder", "generator", "text_encoder"),
)
"""Nested configurations of a submodel. Engines would read the model's fields from them."""

_ASSUMED: Mapping[str, Callable[[HFConfig], object]] = {
    "head_dim": lambda config: integer(config, "hidden_size") // integer(config, "num_attention_heads"),
    "tie_word_embeddings": lambda config: False,
    "moe_layer_freq": lambda config: 1,
    "qkv_bias": lambda config: True,
}
"""Field -> value that an engine assumes if it does not read the field."""

_EPSILON = 1e-4
"""Largest accepted rms_norm_eps: log-probabilities of a tiny model differ by less than 1e-4 nats. DeepSeek has 1e-6,
Moonlight 1e-5."""


def neutral_fields(family: Family, config: HFConfig) -> dict[str, object]:
    """Return the neutral value of every field of NEUTRAL that has another value in config.json.

    Raises: ConversionError for a configuration that the family cannot represent.
    """
    found: dict[str, object] = {}
    # Sorted: the order of a set differs between processes.
    for key in sorted((NEUTRAL.keys() & config.keys()) - family.own_fields - family.absent_for_engines):
        value = NEUTRAL[key]
        if isinstance(value, NeutralSize):
            value = family.model_arguments(config).transformer[value.name]
        if isinstance(value, NeutralRotation):
            value = not family.model_arguments(config).transformer.get("rotary_interleaved", False)
        # Compare types too: in Python 1 == True == 1.0.
        if type(config[key]) is not type(value) or config[key] != value:
            found[key] = value
    return found


def refuse_for_engine(family: Family, config: HFConfig, engine: str) -> None:
    """Reject a family that `engine` cannot compute, and fields that no override can fix: fields that take effect by
    their presence or that `engine` ignores.

    Raises: ConversionError.
    """
    if engine in family.refused_by_engines:
        others = {"vllm", "sglang"} - family.refused_by_engines.keys()
        remedy = (
            "set rollout.engine to another engine" if others else "use algorithm.policy_loss.name=sft without engines"
        )
        raise ConversionError(
            f"config.json: model_type {family.model_type} is not supported by {engine}: "
            f"{family.refused_by_engines[engine]}; {remedy}"
        )
    check = {"vllm": family.check_vllm, "sglang": family.check_sglang}[engine]
    check(ConfigWithDefaults(config, family.defaults, family.nullable))
    _refuse_unread(family, config, engine)
    refuse_rotation(family, config, engine)
    for key in SUBMODELS:
        if config.get(key) is not None and key not in family.own_fields:
            raise ConversionError(
                f"config.json: {key} is not supported: inference engines read the model's fields from it, but "
                f"transformers' {family.model_type} does not; remove it"
            )
    for key in sorted(family.absent_for_engines & config.keys()):
        raise ConversionError(
            f"config.json: {key} {config[key]!r} is not supported: inference engines build another attention if it is "
            "present, whatever its value; remove it"
        )


def _refuse_unread(family: Family, config: HFConfig, engine: str) -> None:
    for key in family.unread_by_engines.keys() & _ASSUMED.keys():
        value, assumed = config.get(key), _ASSUMED[key](config)
        if engine in family.unread_by_engines[key] and value is not None and value != assumed:
            raise ConversionError(
                f"config.json: {key} {json.dumps(value)} is not supported by {engine}, which computes "
                f"{family.model_type} as if it were {json.dumps(assumed)}"
            )
    latent_epsilon, epsilon = family.model_arguments(config).latent_norm_epsilon, number(config, "rms_norm_eps", 0.0)
    if latent_epsilon is not None and epsilon > _EPSILON:
        raise ConversionError(
            f"config.json: rms_norm_eps {epsilon} is not supported by {engine}, which uses it for the latent norms too "
            f"(transformers: {latent_epsilon}); set it to at most {_EPSILON}"
        )
