"""Multi-head latent attention (DeepSeek V2 and V3): rows and arguments. Source: transformers models/deepseek_v3.

Queries, and jointly keys and values, are projected down to latents, normalised, and projected up to the heads. All
heads share the part of the key that carries the position. Down projections and norms are replicated over
tensor-parallel ranks; up projections are divided by heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from model_converters.errors import ConversionError
from model_converters.families.parts import family
from model_converters.families.parts.arguments import ModelArguments, TransformerArguments
from model_converters.families.parts.family import whole_row
from model_converters.families.parts.hf_config import HFConfig, integer, refuse_unsupported, require
from model_converters.families.parts.rotary import rope_section
from model_converters.families.parts.rotary_scaling import Scaling, Yarn
from model_converters.mapping.table import Row
from model_converters.mapping.transforms import Heads, Shape

# transformers and DeepSeek's own code do not use the model's rms_norm_eps for these norms.
LATENT_NORM_EPSILON = 1e-6
REFUSED_BY_LATENT_ATTENTION: HFConfig = {
    **family.REFUSED_BY_ALL,
    "attention_bias": True,
    "hidden_act": "gelu",
    "index_topk": 2048,
    "num_key_value_heads": 1,
    "quantization_config": {"quant_method": "gptq"},
    "rope_interleave": False,
    **family.REFUSED_ROTATIONS,
}
"""Fields that latent_model_arguments rejects, with an example value; see Description.refused."""
OWN_FIELDS = frozenset({"v_head_dim"})
ABSENT_FOR_ENGINES = frozenset({"index_topk", "compress_ratios"})
"""Values of Family.own_fields and Family.absent_for_engines for latent attention. vLLM builds sparse or compressed
attention if a field of ABSENT_FOR_ENGINES is present, even with null."""
_MCORE, _HF = "decoder.layers.{l}.self_attention.", "model.layers.{l}.self_attn."
# Fields that `rotary` accepts and yarn does not have.
_NOT_YARN = ("attention_factor", "high_freq_factor", "low_freq_factor")


def latent_sizes(config: HFConfig) -> TransformerArguments:
    """Read the sizes of latent attention, as arguments of MLATransformerConfig.

    q_lora_rank is None if queries have no latent. Query and key of a head have qk_head_dim elements without position,
    and qk_pos_emb_head_dim elements with position.

    Raises: ConversionError naming a setting that the rows or Megatron's attention cannot represent.
    """
    refuse_unsupported(config)
    require(config, "attention_bias", False, reason="the table has no row for attention biases")
    require(config, "rope_interleave", True, reason="megatron pairs neighbouring elements of a latent head")
    for key in ("index_topk", "index_n_heads", "index_head_dim"):
        require(config, key, None, reason="the table has no row for the indexer of sparse attention")
    num_heads = integer(config, "num_attention_heads")
    require(config, "num_key_value_heads", num_heads, None, reason="latent attention has no groups of heads")
    rope_dim = integer(config, "qk_rope_head_dim")
    require(
        config, "head_dim", rope_dim, reason="transformers rotates head_dim elements, which must be qk_rope_head_dim"
    )
    if rope_dim % 2:
        raise ConversionError(f"config.json: qk_rope_head_dim {rope_dim} is odd, but rotation pairs its elements")
    return {
        "multi_latent_attention": True,
        "q_lora_rank": None if config.get("q_lora_rank") is None else integer(config, "q_lora_rank"),
        "kv_lora_rank": integer(config, "kv_lora_rank"),
        "qk_head_dim": integer(config, "qk_nope_head_dim"),
        "qk_pos_emb_head_dim": rope_dim,
        "v_head_dim": integer(config, "v_head_dim"),
    }


def latent_attention_rows(config: HFConfig, layers: Sequence[int]) -> list[Row]:
    """Return the rows of the norms before attention and MLP, and of all projections of latent attention."""
    sizes, mcore, hf = latent_sizes(config), "decoder.layers.{l}.", "model.layers.{l}."
    hidden, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    q_rank, kv_rank = sizes["q_lora_rank"], sizes["kv_lora_rank"]
    nope_dim, rope_dim, value_dim = sizes["qk_head_dim"], sizes["qk_pos_emb_head_dim"], sizes["v_head_dim"]
    q_rows, kv_rows = heads * (nope_dim + rope_dim), heads * (nope_dim + value_dim)
    # Without a latent, one projection leads to the heads.
    query = [_by_heads("linear_q_proj", "q_proj", heads, (q_rows, hidden), layers)]
    if q_rank is not None:
        query = [
            _whole("linear_q_down_proj", "q_a_proj", (q_rank, hidden), layers),
            whole_row(f"{_MCORE}q_layernorm.weight", f"{_HF}q_a_layernorm.weight", (q_rank,), layers),
            _by_heads("linear_q_up_proj", "q_b_proj", heads, (q_rows, q_rank), layers),
        ]
    return [
        whole_row(f"{mcore}input_layernorm.weight", f"{hf}input_layernorm.weight", (hidden,), layers),
        *query,
        # Output: the latent of keys and values, and the positional part of the key that all heads share.
        _whole("linear_kv_down_proj", "kv_a_proj_with_mqa", (kv_rank + rope_dim, hidden), layers),
        whole_row(f"{_MCORE}kv_layernorm.weight", f"{_HF}kv_a_layernorm.weight", (kv_rank,), layers),
        _by_heads("linear_kv_up_proj", "kv_b_proj", heads, (kv_rows, kv_rank), layers),
        _by_heads("linear_proj", "o_proj", heads, (hidden, heads * value_dim), layers, dim=1),
        whole_row(f"{mcore}pre_mlp_layernorm.weight", f"{hf}post_attention_layernorm.weight", (hidden,), layers),
    ]


def _whole(mcore: str, hf: str, shape: Shape, layers: Sequence[int]) -> Row:
    """Return the row of a projection that every tensor-parallel rank holds."""
    return replace(whole_row(f"{_MCORE}{mcore}.weight", f"{_HF}{hf}.weight", shape, layers), fp8=True)


def _by_heads(mcore: str, hf: str, num_heads: int, shape: Shape, layers: Sequence[int], dim: int = 0) -> Row:
    row = _whole(mcore, hf, shape, layers)
    return replace(row, transform=Heads(num_heads=num_heads), axis="tp", dim=dim, split_by="num_attention_heads")


def latent_model_arguments(config: HFConfig, experts: TransformerArguments) -> ModelArguments:
    """Return the arguments of a model with latent attention; `experts` are the arguments of its experts.

    Raises: ConversionError naming a rope scaling that Megatron does not support.
    """
    sizes, heads = latent_sizes(config), integer(config, "num_attention_heads")
    # decoder_arguments describes attention with groups: here every head is one.
    as_grouped: TransformerArguments = {
        "hidden_size": integer(config, "hidden_size"),
        "num_attention_heads": heads,
        "num_query_groups": heads,
        "kv_channels": sizes["v_head_dim"],
        "add_qkv_bias": False,
        "qk_layernorm": True,
    }
    transformer: TransformerArguments = {**family.decoder_arguments(config, as_grouped), **sizes, **experts}
    arguments = family.model_arguments(config, transformer, rope_types=("default", "yarn"))
    # model_arguments has rejected rotations other than default and yarn. Megatron's latent attention computes yarn.
    transformer["rotary_base"] = arguments.rotary.base
    transformer |= _position_arguments(config, arguments.rotary.scaling)
    return replace(arguments, latent_norm_epsilon=LATENT_NORM_EPSILON)


def _position_arguments(config: HFConfig, scaling: Scaling | None) -> TransformerArguments:
    if not isinstance(scaling, Yarn):
        return {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    name, found = rope_section(config)
    unknown = [key for key in _NOT_YARN if found.get(key) is not None]
    if unknown:
        raise ConversionError(f"config.json: rope scaling 'yarn' with {', '.join(unknown)} is not supported")
    if not scaling.truncate:
        raise ConversionError(f"config.json: {name}.truncate must be true or unset: megatron rounds the ramp's bounds")
    mscale, mscale_all_dim = _mscales(scaling)
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_tokens,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "mscale": mscale,
        "mscale_all_dim": mscale_all_dim,
    }


def _mscales(scaling: Yarn) -> tuple[float, float]:
    """Return mscale and mscale_all_dim. With only one of them transformers and Megatron use different formulas."""
    given = {key: value for key in ("mscale", "mscale_all_dim") if (value := getattr(scaling, key))}
    # mscale 1 without mscale_all_dim equals the defaults below.
    if len(given) == 1 and given != {"mscale": 1.0}:
        (key,) = given
        other = "mscale_all_dim" if key == "mscale" else "mscale"
        raise ConversionError(f"config.json: rope scaling 'yarn' has {key} {given[key]} without {other}; set both")
    return given.get("mscale", 1.0), given.get("mscale_all_dim", 0.0)
