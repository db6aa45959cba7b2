"""Gemma 3, text: norms before and after attention and MLP, sliding windows in most layers, and two rotations.

Source: transformers models/gemma3 (Gemma3TextConfig, Gemma3ForCausalLM). Releases from 4B on also read images; their
text model is converted first.
"""

from __future__ import annotations

from dataclasses import replace

from model_converters.errors import ConversionError
from model_converters.families.parts import family, gated_mlp
from model_converters.families.parts.arguments import ModelArguments, TransformerArguments
from model_converters.families.parts.hf_config import HFConfig, integer, number, require, section
from model_converters.families.parts.rotary import rotary
from model_converters.families.parts.windows import FULL, WINDOW, layer_kinds, window_arguments, with_rotation_of
from model_converters.mapping.table import Row

# Defaults of transformers' Gemma3TextConfig for absent fields; releases rely on most of them.
_DEFAULTS: dict[str, object] = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 1e4,
    "rope_theta": 1e6,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
    "vocab_size": 262208,
}
_ROPE_TYPES = ("default", "linear")


def _attention(config: HFConfig) -> TransformerArguments:
    require(config, "hidden_activation", "gelu_pytorch_tanh", reason="the MLPs of this family have this activation")
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        require(config, key, None, reason="megatron does not cap scores and logits")
    require(config, "use_bidirectional_attention", False, None, reason="attention is causal")
    # layer_kinds reads the windows.
    attention = family.grouped_attention({**config, "layer_types": None, "sliding_window": None}, qk_norm=True)
    attention["post_norms"] = True
    attention["softmax_scale"] = number(config, "query_pre_attn_scalar", positive=True) ** -0.5
    return attention


def _rows(config: HFConfig) -> list[Row]:
    layers = range(integer(config, "num_hidden_layers"))
    return [
        *family.embedding_rows(config),
        *family.attention_rows(_attention(config), layers),
        *gated_mlp.mlp_rows(config, layers),
    ]


def _model_arguments(config: HFConfig) -> ModelArguments:
    transformer = family.decoder_arguments(config, _attention(config))
    transformer |= window_arguments(config, layer_kinds(config, integer(config, "sliding_window_pattern")))
    transformer |= {
        "activation_func": "gelu_tanh",
        "embedding_scale": transformer["hidden_size"] ** 0.5,
        "layernorm_zero_centered_gamma": True,
    }
    whole = with_rotation_of(config, FULL, "rope_theta")
    windowed = with_rotation_of(config, WINDOW, "rope_local_base_freq")
    arguments = family.model_arguments(whole, transformer, rope_types=_ROPE_TYPES)
    return replace(arguments, window_rotary=rotary(windowed, transformer["kv_channels"], known=_ROPE_TYPES))


def _check_vllm(config: HFConfig) -> None:
    # vLLM 0.32 cannot divide positions by a whole number.
    for kind, base in ((FULL, "rope_theta"), (WINDOW, "rope_local_base_freq")):
        factor = section(with_rotation_of(config, kind, base), "rope_parameters").get("factor")
        if isinstance(factor, int):
            raise ConversionError(
                f"config.json: factor {factor} of the rotation is not supported by vllm; write {float(factor)}"
            )


GEMMA3 = family.Family(
    "gemma3_text",
    _rows,
    _model_arguments,
    defaults=_DEFAULTS,
    nullable=("sliding_window",),
    architecture="Gemma3ForCausalLM",
    own_fields=frozenset(
        {"attn_logit_softcapping", "final_logit_softcapping", "sliding_window", "use_bidirectional_attention"}
    ),
    refused_by_engines={"sglang": "its weight updates are not tested for this family"},
    check_vllm=_check_vllm,
    description=family.Description(
        models="Gemma 3 270M to 27B (text)",
        covers="norms before and after attention and MLP, zero-centred, q and k norms, sliding windows with a rotation "
        "of their own, scaled embeddings, tied or untied",
        refused={
            "attention_bias": True,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "hidden_activation": "silu",
            "layer_types": ["chunked_attention"],
            "quantization_config": {"quant_method": "gptq"},
            "use_bidirectional_attention": True,
            **family.REFUSED_BY_ALL,
            **family.REFUSED_ROTATIONS,
        },
        vllm_cpu="runs",
    ),
)
