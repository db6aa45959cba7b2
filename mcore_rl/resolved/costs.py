"""Training cost of a sequence, from the sizes in config.json. Does not import megatron.core, so that the driver can use
it."""

from __future__ import annotations

from math import prod

from mcore_rl.data.packing import SequenceCost
from mcore_rl.resolved.layout import model_arguments
from model_converters.families import family_for
from model_converters.families.parts.arguments import TransformerArguments
from model_converters.families.parts.hf_config import HFConfig

DELTA_RULE_CHUNK = 64
"""Tokens of a chunk of the gated delta rule (mcore_rl/megatron/model/linear_attention)."""


def sequence_cost(hf_config: HFConfig) -> SequenceCost:
    """Compute FLOPs of the forward pass per token, and per pair of tokens in causal attention.

    The backward pass costs twice as much of both, and recomputation once more, so the ratio of the two also holds for
    a whole update. Per token: 2 FLOPs for every weight that is applied to it (all matrices except the embedding, and
    only the selected fraction of routed experts), and linear attention. Per pair: 2 for every element of the key
    (score) and of the value (output), for each head in every layer with self-attention; layers with a sliding window
    count the pairs in it.
    """
    sizes = model_arguments(hf_config).transformer
    chosen = sizes.get("moe_router_topk", 0) / (sizes.get("num_moe_experts") or 1)
    weights = 0.0
    for row in family_for(hf_config).rows(hf_config):
        if row.place in ("layer", "head"):
            # Vectors (norms, biases) are not matrix products and cost almost nothing.
            numel = sum(prod(shape) for shape in row.shapes if len(shape) > 1)
            copies = (len(row.layers) if row.place == "layer" else 1) * (row.num_experts * chosen or 1)
            weights += numel * copies
    per_pair, windowed = pair_flops(sizes), num_window_layers(sizes)
    return SequenceCost(
        per_token=2 * weights + linear_attention_flops(sizes),
        per_pair=_num_whole_layers(sizes) * per_pair,
        per_window_pair=windowed * per_pair,
        window=sizes["window_size"][0] + 1 if windowed else 0,
    )


def attention_flops(sizes: TransformerArguments, tokens: float) -> float:
    """Compute FLOPs of the forward pass of all layers' attention per token of a sequence of `tokens` tokens: half of
    them, on average, are visible keys; in a layer with a window of w < tokens keys, w - w^2 / (2 tokens)."""
    windowed = num_window_layers(sizes)
    keys = _num_whole_layers(sizes) * tokens / 2
    if windowed:
        window = min(sizes["window_size"][0] + 1, tokens)
        keys += windowed * (window - window * window / (2 * tokens))
    return pair_flops(sizes) * keys


def num_window_layers(sizes: TransformerArguments) -> int:
    """Count the layers whose attention has a sliding window."""
    if not sizes.get("window_size"):
        return 0
    # Megatron gives every layer the window if there is no pattern.
    return sum(map(bool, sizes.get("window_attn_skip_freq", [1] * sizes["num_layers"])))


def _num_whole_layers(sizes: TransformerArguments) -> int:
    """Count the layers with self-attention to all preceding tokens."""
    return sizes["num_layers"] - num_window_layers(sizes) - sum(sizes.get("linear_attention_freq", []))


def pair_flops(sizes: TransformerArguments) -> float:
    """Compute FLOPs of the forward pass of one layer per pair of query and key token.

    Attention to chosen tokens computes all pairs, and an indexer's score of each, which has no backward pass.
    """
    if sizes.get("multi_latent_attention"):
        # Queries and keys have a rotary part in addition, values do not.
        width = sizes["qk_head_dim"] + sizes["qk_pos_emb_head_dim"] + sizes["v_head_dim"]
    else:
        width = 2 * sizes["kv_channels"]
    index = sizes.get("dsa_indexer_n_heads", 0) * sizes.get("dsa_indexer_head_dim", 0)
    return float(2 * (sizes["num_attention_heads"] * width + index))


def linear_attention_flops(sizes: TransformerArguments) -> float:
    """Compute FLOPs of the forward pass of all gated delta rules per token, without projections and convolutions, whose
    weights count like others.

    Per value head, with keys of k and values of v elements in chunks of c tokens: products of keys and of queries with
    the chunk's keys (4 c k), a triangular system (c (k + v)), the scores' products with values (2 c v), and three
    products with the state (6 k v).
    """
    layers = sum(sizes.get("linear_attention_freq", []))
    if not layers:
        return 0.0
    k, v = sizes["linear_key_head_dim"], sizes["linear_value_head_dim"]
    head = 4 * DELTA_RULE_CHUNK * k + DELTA_RULE_CHUNK * (k + v) + 2 * DELTA_RULE_CHUNK * v + 6 * k * v
    return float(layers * sizes["linear_num_value_heads"] * head)
