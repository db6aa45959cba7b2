"""gpt-oss: attention with sinks and alternating windows, experts with biases and a clamped gate.

Tensor names follow the releases, which store the experts of a layer in one tensor: in bfloat16 transposed, in MXFP4 as
blocks and scales, gate and up alternating in both. Exports are in bfloat16. Source: transformers models/gpt_oss.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from model_converters.errors import ConversionError
from model_converters.families.parts import experts, family, gated_mlp
from model_converters.families.parts.arguments import ModelArguments, TransformerArguments
from model_converters.families.parts.hf_config import HFConfig, has_mxfp4, integer, number, require, section
from model_converters.families.parts.rotary import rope_section
from model_converters.families.parts.rotary_scaling import Yarn
from model_converters.families.parts.windows import layer_kinds, window_arguments
from model_converters.mapping.table import Row, Stored
from model_converters.mapping.transforms import GateUp, Heads, Same

# Defaults of transformers' GptOssConfig for absent fields.
_DEFAULTS = {
    "attention_bias": True,
    "head_dim": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "rope_theta": 150000.0,
    "sliding_window": 128,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
_MCORE, _HF = "decoder.layers.{l}.", "model.layers.{l}."


def _attention(config: HFConfig) -> TransformerArguments:
    require(config, "attention_bias", True, reason="megatron has biases in all linear layers or in none")
    if has_mxfp4(config):
        free = {"quant_method", "modules_to_not_convert", "dequantize", "use_kernels"}
        for key in section(config, "quantization_config").keys() - free:
            raise ConversionError(f"config.json: quantization_config (mxfp4): {key} is not supported")
    # layer_kinds reads the windows.
    others = {**config, "layer_types": None, "sliding_window": None}
    if has_mxfp4(config):
        del others["quantization_config"]
    return family.grouped_attention(others, qkv_bias=True, bias_of_qkv_only=True)


def _num_experts(config: HFConfig) -> int:
    return integer(config, "num_local_experts", "num_experts")


def _rows(config: HFConfig) -> list[Row]:
    attention, layers = _attention(config), range(integer(config, "num_hidden_layers"))
    hidden, num_heads = attention["hidden_size"], attention["num_attention_heads"]
    sinks = Row(
        mcore=f"{_MCORE}self_attention.core_attention.softmax_offset",
        hf=(f"{_HF}self_attn.sinks",),
        shapes=((num_heads,),),
        transform=Heads(num_heads=num_heads),
        axis="tp",
        split_by="num_attention_heads",
        layers=tuple(layers),
    )
    projection = f"{_MCORE}self_attention.linear_proj.bias", f"{_HF}self_attn.o_proj.bias"
    return [
        *family.embedding_rows(config),
        *family.attention_rows(attention, layers),
        family.whole_row(*projection, (hidden,), layers),
        sinks,
        *_expert_rows(hidden, integer(config, "intermediate_size"), _num_experts(config), layers),
    ]


def _expert_rows(hidden: int, intermediate: int, num_experts: int, layers: range) -> list[Row]:
    mcore, hf, stacked = f"{_MCORE}mlp.", f"{_HF}mlp.", f"{_HF}mlp.experts."
    gate = Stored(name=f"{stacked}gate_up_proj", rows=2 * intermediate, step=2, transposed=True, mxfp4=True)
    down = Stored(name=f"{stacked}down_proj", rows=hidden, transposed=True, mxfp4=True)
    gate_bias = Stored(name=f"{stacked}gate_up_proj_bias", rows=2 * intermediate, step=2)
    down_bias = Stored(name=f"{stacked}down_proj_bias", rows=hidden)
    weights = gated_mlp.gated_rows(
        (f"{mcore}experts.", f"{hf}experts.{{e}}."),
        hidden,
        intermediate,
        layers,
        split_by="intermediate_size",
        num_experts=num_experts,
        stored=(gate, replace(gate, start=1), down),
    )
    row = partial(Row, layers=tuple(layers), num_experts=num_experts, stacked_release=True)
    return [
        family.whole_row(f"{mcore}router.weight", f"{hf}router.weight", (num_experts, hidden), layers),
        family.whole_row(f"{mcore}router.bias", f"{hf}router.bias", (num_experts,), layers),
        *(replace(weight, fp8=False, stacked_release=True) for weight in weights),
        row(
            mcore=f"{mcore}experts.linear_fc1.bias{{e}}",
            hf=tuple(f"{hf}experts.{{e}}.{part}_proj.bias" for part in ("gate", "up")),
            shapes=((intermediate,), (intermediate,)),
            transform=GateUp(),
            axis="etp",
            split_by="intermediate_size",
            stored=(gate_bias, replace(gate_bias, start=1)),
        ),
        # Added to the sum over the ranks of an expert.
        row(
            mcore=f"{mcore}experts.linear_fc2.bias{{e}}",
            hf=(f"{hf}experts.{{e}}.down_proj.bias",),
            shapes=((hidden,),),
            transform=Same(),
            stored=(down_bias,),
        ),
    ]


def _model_arguments(config: HFConfig) -> ModelArguments:
    # The gate is g * sigmoid(1.702 g), which Megatron calls quick_gelu.
    require(config, "swiglu_alpha", 1.702, reason="megatron's quick_gelu has this constant")
    transformer = family.decoder_arguments(config, _attention(config))
    intermediate = integer(config, "intermediate_size")
    transformer |= experts.softmax_experts(config, _num_experts(config), intermediate, normalised=True)
    # The first layer has a window, and every second one after it.
    transformer |= window_arguments(config, layer_kinds(config, 2))
    transformer |= {
        "activation_func": "quick_gelu",
        "activation_func_clamp_value": number(config, "swiglu_limit", positive=True),
        "glu_linear_offset": 1.0,
        "softmax_type": "learnable",
        "add_bias_linear": True,
    }
    return family.model_arguments(config, transformer)


# Constants of vLLM's class (0.32).
_VLLM_CONSTANTS: dict[str, object] = {"rms_norm_eps": 1e-5, "swiglu_limit": 7.0}


def _check_vllm(config: HFConfig) -> None:
    for key, value in _VLLM_CONSTANTS.items():
        require(config, key, value, reason="vllm has this constant")
    arguments = GPT_OSS.model_arguments(config)
    windows = arguments.transformer.get("window_attn_skip_freq", [])
    if windows != [1 - layer % 2 for layer in range(integer(config, "num_hidden_layers"))]:
        raise ConversionError(
            "config.json: layer_types is not supported by vllm, which has a window in the first layer and in every "
            "second one after it"
        )
    name, found = rope_section(config)
    scaling, factor = arguments.rotary.scaling, arguments.rotary.factor
    if not isinstance(scaling, Yarn):
        raise ConversionError(
            f"config.json: {name} has rope type {found['rope_type']!r}, which is not supported by vllm, only 'yarn'"
        )
    for key in ("beta_fast", "beta_slow"):
        if not found.get(key):
            raise ConversionError(
                f"config.json: {name}.{key} is absent, and vllm needs it; set it to {getattr(scaling, key)}"
            )
    if factor != replace(scaling, mscale=0.0, mscale_all_dim=0.0).magnitude:
        raise ConversionError(
            f"config.json: {name}: attention_factor and mscale are not supported by vllm, which does not read them"
        )


GPT_OSS = family.Family(
    "gpt_oss",
    _rows,
    _model_arguments,
    defaults=_DEFAULTS,
    nullable=("sliding_window",),
    architecture="GptOssForCausalLM",
    own_fields=frozenset({"sliding_window", "swiglu_limit"}),
    unread_by_engines={"tie_word_embeddings": family.VLLM},
    refused_by_engines={"sglang": "its attention on CPU has no sinks"},
    check_vllm=_check_vllm,
    description=family.Description(
        models="gpt-oss-20b, gpt-oss-120b",
        covers="attention sinks, alternating sliding windows, biases, experts with a clamped gate; checkpoints in "
        "bfloat16 and in MXFP4, exports in bfloat16",
        refused={
            "attention_bias": False,
            "hidden_act": "gelu",
            "layer_types": ["chunked_attention"],
            "num_experts_per_tok": 1,
            "quantization_config": {"quant_method": "gptq"},
            "swiglu_alpha": 1.5,
            **family.REFUSED_BY_ALL,
            **family.REFUSED_ROTATIONS,
        },
        vllm_cpu="runs",
    ),
)
