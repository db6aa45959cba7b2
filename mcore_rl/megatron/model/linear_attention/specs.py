"""Layers of a model that have linear attention, and their specification."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_linear_attention_pattern
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from mcore_rl.megatron.model.linear_attention.layer import GatedSelfAttention, OutputNorm, PackedGatedDeltaNet


def use_linear_attention(layers: Sequence[ModuleSpec], config: TransformerConfig, vp_stage: int | None) -> None:
    """Replace the attention of the chunk's layers that have linear attention, in place. Layers with self-attention stay
    as they are.

    layers: specifications of the chunk's decoder layers, TransformerEngine's or local ones.
    """
    if config.linear_attention_freq is None:
        return
    pattern = get_linear_attention_pattern(config)
    for layer, number in zip(layers, _layer_numbers(config, vp_stage), strict=True):
        if pattern[number]:
            parts = layer.submodules
            projections = parts.self_attention.submodules
            # The first projection has the fused norm of TransformerEngine's layers, like that of self-attention.
            modules = GatedDeltaNetSubmodules(
                in_proj=projections.linear_qkv, out_norm=OutputNorm, out_proj=projections.linear_proj
            )
            parts.self_attention = ModuleSpec(module=PackedGatedDeltaNet, submodules=modules)


def gate_outputs(layers: Sequence[ModuleSpec]) -> None:
    """Replace the self-attention in these specifications by one with gated outputs."""
    for layer in layers:
        attention = layer.submodules.self_attention
        if not is_linear(attention):
            attention.module = GatedSelfAttention


def is_linear(attention: ModuleSpec) -> bool:
    """Return True for the specification of linear attention."""
    return attention.module is PackedGatedDeltaNet


def _layer_numbers(config: TransformerConfig, vp_stage: int | None) -> Sequence[int]:
    """Return the global indices of the chunk's decoder layers, like megatron's get_gpt_decoder_block_spec."""
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        return layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    return range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
