"""Hybrid attention of Qwen3-Next and Qwen3.5: gated delta nets, and attention with an output gate in every few layers.

A gated delta net projects each token to queries and keys (one per key head), values, output gates z, and the scalars b
and a (one per value head). q, k and v pass a causal convolution. Megatron's tensors of one net:

| mcore | sections, each divided by key heads |
|---|---|
| `in_proj.weight` | q, k, v, z, b, a |
| `conv1d.weight` | q, k, v |
| `A_log`, `dt_bias` | one element per value head |

Source: transformers models/qwen3_next, models/qwen3_5; megatron.core.ssm.gated_delta_net (0.16.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from model_converters.errors import ConversionError
from model_converters.families.parts import family
from model_converters.families.parts.arguments import TransformerArguments
from model_converters.families.parts.family import whole_row
from model_converters.families.parts.hf_config import HFConfig, integer, require
from model_converters.mapping.table import Row
from model_converters.mapping.transforms import Heads, Section, Sections

LAYER_TYPES = ("linear_attention", "full_attention")
DEFAULTS: HFConfig = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "partial_rotary_factor": 0.25,
}
"""Defaults of both families' configuration classes in transformers."""
REFUSED: dict[str, object] = {
    **{key: value for key, value in family.REFUSED_BY_ATTENTION.items() if key != "partial_rotary_factor"},
    "attn_output_gate": False,
    "layer_scale": True,
    "linear_num_value_heads": 5,
    "output_gate_type": "sigmoid",
}
"""Fields that hybrid_attention rejects, with an example value."""
_MCORE, _HF = "decoder.layers.{l}.self_attention.", "model.layers.{l}.linear_attn."
_UNITS = "linear_num_key_heads"


def linear_layers(config: HFConfig) -> list[bool]:
    """Return for every decoder layer whether its attention is a gated delta net.

    Raises: ConversionError if layer_types has another length than the model.
    """
    count, kinds = integer(config, "num_hidden_layers"), config.get("layer_types")
    if kinds is None:
        interval = integer(config, "full_attention_interval", default=4)
        return [(layer + 1) % interval != 0 for layer in range(count)]
    assert isinstance(kinds, list | tuple)  # hybrid_attention has checked it
    if len(kinds) != count:
        raise ConversionError(f"config.json: layer_types has {len(kinds)} entries for num_hidden_layers {count}")
    return [kind == "linear_attention" for kind in kinds]


def hybrid_attention(config: HFConfig) -> TransformerArguments:
    """Read the arguments of both kinds of attention, and of the zero-centred norms (their factor is 1 + weight).

    Raises: ConversionError naming an unsupported setting.
    """
    attention = family.grouped_attention(config, qk_norm=True, layer_types=LAYER_TYPES)
    require(config, "attn_output_gate", True, reason="transformers always gates the output of attention")
    require(config, "output_gate_type", "swish", "silu", None, reason="transformers gates delta nets with SiLU")
    require(config, "layer_scale", False, None, reason="the table has no row for scales of layers")
    linear = linear_layers(config)
    if all(linear):
        raise ConversionError(
            "config.json: no layer has full_attention (layer_types, full_attention_interval); transformers needs one"
        )
    attention |= {"attention_output_gate": True, "layernorm_zero_centered_gamma": True}
    return {**attention, **_net_sizes(config, linear)} if any(linear) else attention


def _net_sizes(config: HFConfig, linear: Sequence[bool]) -> TransformerArguments:
    keys, values = integer(config, "linear_num_key_heads"), integer(config, "linear_num_value_heads")
    if values % keys:
        raise ConversionError(
            f"config.json: linear_num_value_heads {values} is not a multiple of linear_num_key_heads {keys}"
        )
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(is_linear) for is_linear in linear],
        "linear_conv_kernel_dim": integer(config, "linear_conv_kernel_dim"),
        "linear_key_head_dim": integer(config, "linear_key_head_dim"),
        "linear_value_head_dim": integer(config, "linear_value_head_dim"),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
    }


def hybrid_rows(config: HFConfig, linear: Sequence[bool], *, separate: bool) -> list[Row]:
    """Return the rows of both kinds of attention, and of the norms before attention and MLP.

    linear: for every layer whether its attention is a gated delta net.
    separate: whether HF stores the projections of q, k and v, of z, of b and of a as four tensors (Qwen3.5), or as two
    tensors that are ordered by key head (Qwen3-Next).
    """
    attention = hybrid_attention(config)
    nets = [layer for layer, is_linear in enumerate(linear) if is_linear]
    full = [layer for layer, is_linear in enumerate(linear) if not is_linear]
    rows = family.attention_rows(attention, full) if full else []
    return rows + (_net_rows(attention, nets, separate=separate) if nets else [])


def _net_rows(net: TransformerArguments, layers: Sequence[int], *, separate: bool) -> list[Row]:
    hidden, key_heads, value_heads = net["hidden_size"], net["linear_num_key_heads"], net["linear_num_value_heads"]
    keys, values = key_heads * net["linear_key_head_dim"], value_heads * net["linear_value_head_dim"]
    row = partial(Row, axis="tp", layers=tuple(layers), split_by=_UNITS)
    by_head = partial(row, transform=Heads(num_heads=value_heads), split_by="linear_num_value_heads")
    names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a") if separate else ("in_proj_qkvz", "in_proj_ba")
    joined = (2 * keys + 2 * values, 2 * value_heads)
    lengths = (2 * keys + values, values, value_heads, value_heads) if separate else joined
    norms = ("input_layernorm", "input_layernorm"), ("pre_mlp_layernorm", "post_attention_layernorm")
    convolution = 2 * keys + values, 1, net["linear_conv_kernel_dim"]
    decay = by_head(mcore=f"{_MCORE}A_log", hf=(f"{_HF}A_log",), shapes=((value_heads,),))
    return [
        *(
            whole_row(f"decoder.layers.{{l}}.{own}.weight", f"model.layers.{{l}}.{other}.weight", (hidden,), layers)
            for own, other in norms
        ),
        row(
            mcore=f"{_MCORE}in_proj.weight",
            hf=tuple(f"{_HF}{name}.weight" for name in names),
            shapes=tuple((length, hidden) for length in lengths),
            transform=_separate_sections(net) if separate else _interleaved_sections(net),
        ),
        row(
            mcore=f"{_MCORE}conv1d.weight",
            hf=(f"{_HF}conv1d.weight",),
            shapes=(convolution,),
            transform=Sections(_joined_sections(keys, values), key_heads),
        ),
        # Qwen3.5 releases store it in float32, and engines keep it so.
        replace(decay, dtype=torch.float32),
        by_head(mcore=f"{_MCORE}dt_bias", hf=(f"{_HF}dt_bias",), shapes=((value_heads,),)),
        whole_row(f"{_MCORE}out_norm.weight", f"{_HF}norm.weight", (net["linear_value_head_dim"],), layers),
        by_head(
            mcore=f"{_MCORE}out_proj.weight", hf=(f"{_HF}out_proj.weight",), shapes=((hidden, values),), dim=1, fp8=True
        ),
    ]


def _joined_sections(keys: int, values: int) -> tuple[Section, ...]:
    """Return q, k and v, which follow each other in the first HF tensor."""
    return Section(0, 1, 0, keys), Section(0, 1, keys, keys), Section(0, 1, 2 * keys, values)


def _separate_sections(net: TransformerArguments) -> Sections:
    key_heads = net["linear_num_key_heads"]
    keys, values = (
        key_heads * net["linear_key_head_dim"],
        net["linear_num_value_heads"] * net["linear_value_head_dim"],
    )
    return Sections((*_joined_sections(keys, values), Section(1), Section(2), Section(3)), key_heads)


def _interleaved_sections(net: TransformerArguments) -> Sections:
    """Return the sections if each key head has [q, k, its values, their gates] and [its values' b, their a]."""
    blocks, key = net["linear_num_key_heads"], net["linear_key_head_dim"]
    per_key = net["linear_num_value_heads"] // blocks
    value = per_key * net["linear_value_head_dim"]
    lengths = ((0, (key, key, value, value)), (1, (per_key, per_key)))
    sections = []
    for part, each in lengths:
        starts = [sum(each[:index]) for index in range(len(each))]
        sections += [Section(part, blocks, start, length) for start, length in zip(starts, each, strict=True)]
    return Sections(tuple(sections), blocks)
