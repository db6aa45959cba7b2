"""Tiny models with gated delta nets, and each rank's tensors of a net, built head by head without the weight table."""

from __future__ import annotations

import torch

from model_converters.mapping.layout import Coordinates, TrainLayout

Tensors = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 4, 8, 3, 2
PER_KEY = VALUE_HEADS // KEY_HEADS
KEYS, VALUES = KEY_HEADS * KEY_DIM, VALUE_HEADS * VALUE_DIM
KERNEL = 4
HYBRID = {
    "vocab_size": 24,
    "hidden_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,  # fewer than tp 4
    "head_dim": 6,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_conv_kernel_dim": KERNEL,
    "linear_key_head_dim": KEY_DIM,
    "linear_value_head_dim": VALUE_DIM,
    "linear_num_key_heads": KEY_HEADS,
    "linear_num_value_heads": VALUE_HEADS,
}
_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 4,
    "shared_expert_intermediate_size": 8,
}
_MTP = {"mtp_num_hidden_layers": 1}
CONFIGS: dict[str, dict[str, object]] = {
    "qwen3_next": {
        **HYBRID,
        **_EXPERTS,
        "model_type": "qwen3_next",
        "intermediate_size": 20,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        "num_nextn_predict_layers": 1,
    },
    "qwen3_5_text": {**HYBRID, **_MTP, "model_type": "qwen3_5_text", "intermediate_size": 20},
    "qwen3_5_moe_text": {**HYBRID, **_EXPERTS, **_MTP, "model_type": "qwen3_5_moe_text"},
}
MTP_NAMES = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "final_layernorm"}


def net_shapes(model_type: str, hidden: int) -> Shapes:
    """Return the shapes of a gated delta net's tensors, by name below the layer."""
    projections = {"qkvz": 2 * KEYS + 2 * VALUES, "ba": 2 * VALUE_HEADS}
    if model_type != "qwen3_next":
        projections = {"qkv": 2 * KEYS + VALUES, "z": VALUES, "b": VALUE_HEADS, "a": VALUE_HEADS}
    return {
        **{f"linear_attn.in_proj_{name}.weight": (rows, hidden) for name, rows in projections.items()},
        "linear_attn.conv1d.weight": (2 * KEYS + VALUES, 1, KERNEL),
        "linear_attn.A_log": (VALUE_HEADS,),
        "linear_attn.dt_bias": (VALUE_HEADS,),
        "linear_attn.norm.weight": (VALUE_DIM,),
        "linear_attn.out_proj.weight": (hidden, VALUES),
    }


def local_net(hf: Tensors, theirs: str, ours: str, layout: TrainLayout, at: Coordinates) -> Tensors:
    """Return the tensors of a net on one tensor-parallel rank: the rows of its key heads and their value heads."""
    each = KEY_HEADS // layout.tp
    heads = range(at.tp * each, (at.tp + 1) * each)
    values = [head * PER_KEY + index for head in heads for index in range(PER_KEY)]
    q, k, v, z, b, a = _by_head(hf, theirs)
    convolution = hf[f"{theirs}conv1d.weight"]
    cq, ck, cv = convolution[:KEYS], convolution[KEYS : 2 * KEYS], convolution[2 * KEYS :]
    output = hf[f"{theirs}out_proj.weight"].unflatten(1, (VALUE_HEADS, VALUE_DIM))
    return {
        f"{ours}in_proj.weight": torch.cat(
            [part[head] for part, own in ((q, heads), (k, heads), (v, values), (z, values)) for head in own]
            + [part[head][None] for part in (b, a) for head in values]
        ),
        f"{ours}conv1d.weight": torch.cat(
            [c.unflatten(0, (KEY_HEADS, KEY_DIM))[h] for c in (cq, ck) for h in heads]
            + [cv.unflatten(0, (VALUE_HEADS, VALUE_DIM))[h] for h in values]
        ),
        f"{ours}A_log": hf[f"{theirs}A_log"][values],
        f"{ours}dt_bias": hf[f"{theirs}dt_bias"][values],
        f"{ours}out_norm.weight": hf[f"{theirs}norm.weight"],
        f"{ours}out_proj.weight": output[:, values].flatten(1),
    }


def _by_head(hf: Tensors, theirs: str) -> tuple[torch.Tensor, ...]:
    """Return q, k [key heads, K, h], v, z [value heads, V, h], b, a [value heads, h]."""
    if f"{theirs}in_proj_qkv.weight" in hf:
        qkv = hf[f"{theirs}in_proj_qkv.weight"]
        q, k = (part.unflatten(0, (KEY_HEADS, KEY_DIM)) for part in (qkv[:KEYS], qkv[KEYS : 2 * KEYS]))
        v, z = (
            part.unflatten(0, (VALUE_HEADS, VALUE_DIM)) for part in (qkv[2 * KEYS :], hf[f"{theirs}in_proj_z.weight"])
        )
        return q, k, v, z, hf[f"{theirs}in_proj_b.weight"], hf[f"{theirs}in_proj_a.weight"]
    # As in Qwen3NextGatedDeltaNet.fix_query_key_value_ordering.
    qkvz = hf[f"{theirs}in_proj_qkvz.weight"].unflatten(0, (KEY_HEADS, -1))
    q, k, v, z = qkvz.split([KEY_DIM, KEY_DIM, PER_KEY * VALUE_DIM, PER_KEY * VALUE_DIM], 1)
    b, a = hf[f"{theirs}in_proj_ba.weight"].unflatten(0, (KEY_HEADS, -1)).split([PER_KEY, PER_KEY], 1)
    v, z = (part.flatten(0, 1).unflatten(0, (VALUE_HEADS, VALUE_DIM)) for part in (v, z))
    return q, k, v, z, b.flatten(0, 1), a.flatten(0, 1)
