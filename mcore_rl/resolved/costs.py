"""What a sequence costs to train, from the sizes in config.json. Imports no megatron.core, so the driver can ask."""

from __future__ import annotations

from math import prod
from typing import Any

from mcore_rl.data.packing import SequenceCost
from mcore_rl.resolved.layout import model_arguments
from model_converters.families import family_for


def sequence_cost(hf_config: dict[str, Any]) -> SequenceCost:
    """FLOPs of the forward pass per token and per pair of tokens that causal attention joins.

    The backward pass costs twice as much of both, recomputation the same again, so the ratio is that of a whole
    update. Per token: 2 for every weight that a token meets, thus of all matrices but the embedding's, and of routed
    experts the share that is chosen. Per pair: 2 for every element of a query and key, and of a value, in every layer.
    """
    sizes = model_arguments(hf_config).transformer
    chosen = sizes.get("moe_router_topk", 0) / (sizes.get("num_moe_experts") or 1)
    weights = 0.0
    for row in family_for(hf_config).rows(hf_config):
        if row.place in ("layer", "head"):
            numel = sum(prod(shape) for shape in row.shapes if len(shape) > 1)
            copies = (len(row.layers) if row.place == "layer" else 1) * (row.num_experts * chosen or 1)
            weights += numel * copies
    return SequenceCost(per_token=2 * weights, per_pair=attention_flops(sizes))


def attention_flops(sizes: dict[str, Any]) -> float:
    """Of the forward pass of all layers, per query token and token that it attends to."""
    if sizes.get("multi_latent_attention"):
        width = sizes["qk_head_dim"] + sizes["qk_pos_emb_head_dim"] + sizes["v_head_dim"]
    else:
        width = 2 * sizes["kv_channels"]
    return float(2 * sizes["num_layers"] * sizes["num_attention_heads"] * width)
