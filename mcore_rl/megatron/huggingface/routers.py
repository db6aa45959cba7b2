"""Routers of transformers' models: Megatron's, so that auxiliary losses, the correction bias and router replay are the
same as in Megatron's model (model/routers.py). Both compute the same weights for every family with a table.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_rl.megatron.model.routers import PolicyRouter


class TransformersRouter(PolicyRouter):
    """Router with the interface of transformers' routers. It uses the weight of the router that it replaces.

    layer_number: number of the layer, from 1.
    """

    def __init__(self, config: TransformerConfig, replaced: torch.nn.Module, layer_number: int) -> None:
        super().__init__(config, get_default_pg_collection())
        self.set_layer_number(layer_number)
        self.weight = replaced.weight

    def forward(
        self, hidden_states: torch.Tensor, correction_bias: torch.Tensor | None = None
    ) -> tuple[None, torch.Tensor, torch.Tensor]:
        """Route the tokens. Returns no logits, the weights and the indices of the chosen experts.

        correction_bias: ignored; MiniMax-M2's layer passes its own buffer, which expert_bias replaces.

        Shapes: hidden_states [..., h] with t tokens -> weights and indices [t, k].
        """
        probabilities, chosen = super().forward(hidden_states.reshape(-1, 1, hidden_states.shape[-1]))
        experts = chosen.to(torch.uint8).topk(self.topk).indices
        return None, probabilities.gather(1, experts), experts
