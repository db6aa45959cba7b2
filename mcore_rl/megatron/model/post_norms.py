"""Layers whose attention and MLP have a norm after them as well as before (Gemma 3): x + norm(attention(norm(x)))."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

_Output = tuple[torch.Tensor, torch.Tensor | None]
"""Output of attention or MLP, and its bias."""


class PostNormLayer(TransformerLayer):
    """Transformer layer with norms after attention and MLP.

    norm: class of all norms of the layer. The other arguments are Megatron's.
    """

    def __init__(
        self, config: TransformerConfig, submodules: TransformerLayerSubmodules, *, norm: type, **given: object
    ) -> None:
        super().__init__(config, submodules, **given)
        build = partial(build_module, norm, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
        self.post_self_attn_layernorm, self.post_mlp_layernorm = build(), build()
        # Megatron calls these functions with (training, fused), and the result with (output, residual, dropout).
        self.self_attn_bda = partial(_normed_residual, self.post_self_attn_layernorm)
        self.mlp_bda = partial(_normed_residual, self.post_mlp_layernorm)


def _normed_residual(
    norm: torch.nn.Module, training: bool, fused: bool
) -> Callable[[_Output, torch.Tensor, float], torch.Tensor]:
    """Return the function that adds the normalized output of attention or MLP to the residual."""

    def add(output: _Output, residual: torch.Tensor, dropout: float) -> torch.Tensor:
        states, bias = output
        assert bias is None, "layers with post_norms have no biases"
        assert not dropout, "build_model sets dropout to 0"
        added: torch.Tensor = residual + norm(states)
        return added

    return add


def use_post_norms(layers: Sequence[ModuleSpec], norm: type) -> None:
    """Build the layers of these specifications with post norms of class `norm`."""
    for layer in layers:
        layer.module, layer.params = PostNormLayer, {**layer.params, "norm": norm}
