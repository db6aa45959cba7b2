"""Another rotation in layers with a sliding window (Gemma 3); Megatron has one rotation for all layers of a chunk."""

from __future__ import annotations

from copy import copy

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import is_layer_window_attention

from model_converters.families.parts.rotary import RotarySettings, inverse_frequencies


def rotate_windows(model: GPTModel, whole: RotarySettings, windowed: RotarySettings) -> None:
    """Set the rotation of the chunk's layers with a window. `whole`: rotation of the other layers."""
    assert whole.factor == windowed.factor, "megatron has one factor on cosines and sines for all layers"
    config = model.config
    frequencies = inverse_frequencies(windowed, config.kv_channels)
    # Shares everything but the frequencies. It caches its angles, so the layers of a pass compute them once.
    embedding = copy(model.rotary_pos_emb)
    embedding.inv_freq = frequencies.to(embedding.inv_freq.device)
    rotation = _Rotation(embedding)
    for layer in model.modules():
        if isinstance(layer, TransformerLayer) and is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer.layer_number
        ):
            layer.self_attention.register_forward_pre_hook(rotation, with_kwargs=True)


class _Rotation:
    """Hook before the forward pass of attention: replaces the angles of its positions.

    A packed row has the angles of positions 0, 1, ... of its longest sequence, on every context-parallel rank.
    """

    def __init__(self, embedding: RotaryEmbedding) -> None:
        self._embedding = embedding

    def __call__(
        self, attention: torch.nn.Module, args: tuple[object, ...], given: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        angles = given["rotary_pos_emb"]
        assert isinstance(angles, torch.Tensor), "megatron passes the angles by this name"
        return args, {**given, "rotary_pos_emb": self._embedding(len(angles), packed_seq=True)}
