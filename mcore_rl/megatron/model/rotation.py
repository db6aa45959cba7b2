"""Rotary position embedding of grouped attention: the frequencies of the family, and a factor on cosines and sines.

Latent attention has its own embedding in every layer, which Megatron computes from TransformerConfig.
"""

from __future__ import annotations

import math

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_rl.megatron.model.vision.rotation import SectionedRotation
from model_converters.families.parts.rotary import RotarySettings, inverse_frequencies


def scale_rotation(config: TransformerConfig, rotary: RotarySettings) -> None:
    """Multiply the cosines and sines of grouped attention by rotary.factor.

    Attention of megatron-core 0.16.1 computes this factor from attributes that TransformerConfig has no fields for:
    (0.1 * yarn_mscale * log(yarn_rotary_scaling_factor) + 1) / (0.1 * yarn_mscale_all_dim * log(...) + 1). The values
    set here give rotary.factor up to the last bit of a double, for every rope type. TransformerEngine's fused kernel
    ignores it for packed rows; resolved.implementation selects the unfused one.
    """
    if rotary.factor == 1 or config.multi_latent_attention:
        return
    assert not config.apply_rope_fusion, "the fused rotary embedding of packed rows has no factor"
    values = {"rotary_scaling_factor": math.e, "mscale": 10 * (rotary.factor - 1), "mscale_all_dim": 0.0}
    for name, value in values.items():
        setattr(config, f"yarn_{name}", value)


def set_frequencies(model: GPTModel, rotary: RotarySettings) -> None:
    """Replace the frequencies of a chunk's rotary embedding, which its decoder and MTP layers share, before its first
    forward pass."""
    config = model.config
    if config.multi_latent_attention:
        return
    embedding = model.rotary_pos_emb
    frequencies = inverse_frequencies(rotary, config.kv_channels)
    assert frequencies.shape == embedding.inv_freq.shape, "Megatron rotates another number of elements"
    if config.mrope_section is not None:
        model.rotary_pos_emb = SectionedRotation(
            frequencies.to(embedding.inv_freq.device),
            config.mrope_section,
            interleaved=getattr(config, "mrope_interleaved", False),
        )
        return
    # Not a buffer, so that neither bfloat16 nor moving the model changes it.
    embedding.inv_freq = frequencies.to(embedding.inv_freq.device)
