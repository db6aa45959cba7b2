"""An oracle that builds each rank's tensors without the weight table, head by head."""

from __future__ import annotations

import torch

from model_converters.mapping.layout import Coordinates, TrainLayout
from tests.unit.converters import hybrid_models, indexers, post_norm_models

Tensors = dict[str, torch.Tensor]
LLAMA_PARTS, MIXTRAL_PARTS = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")


def mtp_layers(config: dict[str, object]) -> range:
    layers = config["num_hidden_layers"]
    count = config.get("num_nextn_predict_layers", config.get("mtp_num_hidden_layers", 0))
    return range(layers, layers + count)


def has_nets(config: dict[str, object]) -> bool:
    return "linear_num_key_heads" in config


def local_tensors(hf: Tensors, config: dict[str, object], layout: TrainLayout, rank: int) -> Tensors:
    """Return the tensors of Megatron's parallel layers on `rank`."""
    at, local = layout.coordinates(rank), {}
    if at.pp == 0:
        local["embedding.word_embeddings.weight"] = _vocabulary(hf["model.embed_tokens.weight"], at.tp, layout.tp)
    for layers in layout.stage_layers(config["num_hidden_layers"])[at.pp]:
        for layer in layers:
            local |= _local_layer(hf, config, f"model.layers.{layer}.", f"decoder.layers.{layer}.", layout, at)
    if at.pp == layout.pp - 1:
        local["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
        if not config["tie_word_embeddings"] or layout.pp > 1:
            head = hf.get("lm_head.weight", hf["model.embed_tokens.weight"])
            local["output_layer.weight"] = _vocabulary(head, at.tp, layout.tp)
        if has_nets(config) and mtp_layers(config):
            local |= _separate_mtp(hf, config, layout, at)
            return local
        for depth, layer in enumerate(mtp_layers(config)):
            ours, theirs = f"mtp.layers.{depth}.", f"model.layers.{layer}."
            copy = hf[f"{theirs}embed_tokens.weight"]
            local["embedding.word_embeddings.weight"] = _vocabulary(copy, at.tp, layout.tp)
            local[f"{ours}enorm.weight"] = hf[f"{theirs}enorm.weight"]
            local[f"{ours}hnorm.weight"] = hf[f"{theirs}hnorm.weight"]
            local[f"{ours}eh_proj.weight"] = _part(hf[f"{theirs}eh_proj.weight"], 0, at.tp, layout.tp)
            local[f"{ours}final_layernorm.weight"] = hf[f"{theirs}shared_head.norm.weight"]
            local |= _local_layer(hf, config, theirs, f"{ours}transformer_layer.", layout, at)
    return local


def _separate_mtp(hf: Tensors, config: dict[str, object], layout: TrainLayout, at: Coordinates) -> Tensors:
    """Return the tensors of the layer that HF stores under mtp., without copies of embedding and head."""
    embedding = _vocabulary(hf["model.embed_tokens.weight"], at.tp, layout.tp)
    return {
        "embedding.word_embeddings.weight": embedding,
        **{f"mtp.layers.0.{ours}.weight": hf[f"mtp.{name}.weight"] for name, ours in hybrid_models.MTP_NAMES.items()},
        "mtp.layers.0.eh_proj.weight": _part(hf["mtp.fc.weight"], 0, at.tp, layout.tp),
        **_local_layer(hf, config, "mtp.layers.0.", "mtp.layers.0.transformer_layer.", layout, at),
    }


def _part(tensor: torch.Tensor, dim: int, index: int, size: int) -> torch.Tensor:
    return tensor.chunk(size, dim)[index]


def _vocabulary(tensor: torch.Tensor, index: int, size: int) -> torch.Tensor:
    """Append zero rows until the ranks' shares are equal, and return one share."""
    while len(tensor) % size:
        tensor = torch.cat([tensor, torch.zeros_like(tensor[:1])])
    return _part(tensor, 0, index, size)


def _local_layer(
    hf: Tensors, config: dict[str, object], theirs: str, ours: str, layout: TrainLayout, at: Coordinates
) -> Tensors:
    norms = post_norm_models.norm_names(config).items()
    local = {f"{ours}{mine}_layernorm.weight": hf[f"{theirs}{name}_layernorm.weight"] for mine, name in norms}
    attention = (f"{theirs}self_attn.", f"{ours}self_attention.", layout, at)
    if f"{theirs}linear_attn.conv1d.weight" in hf:
        local |= hybrid_models.local_net(hf, f"{theirs}linear_attn.", f"{ours}self_attention.", layout, at)
    elif f"{theirs}self_attn.kv_b_proj.weight" in hf:
        local |= _latent_attention(hf, *attention)
    else:
        local |= _grouped_attention(hf, config, *attention)
    block = "block_sparse_moe" if f"{theirs}block_sparse_moe.gate.weight" in hf else "mlp"
    return local | _mlp(hf, f"{theirs}{block}.", f"{ours}mlp.", layout, at)


def _latent_attention(hf: Tensors, theirs: str, ours: str, layout: TrainLayout, at: Coordinates) -> Tensors:
    whole = {
        "linear_q_down_proj": "q_a_proj",
        "q_layernorm": "q_a_layernorm",
        "linear_kv_down_proj": "kv_a_proj_with_mqa",
        "kv_layernorm": "kv_a_layernorm",
    }
    by_heads = {"linear_q_proj": "q_proj", "linear_q_up_proj": "q_b_proj", "linear_kv_up_proj": "kv_b_proj"}
    local = {f"{ours}{mine}.weight": hf.get(f"{theirs}{name}.weight") for mine, name in whole.items()}
    for mine, name in by_heads.items():
        if f"{theirs}{name}.weight" in hf:
            local[f"{ours}{mine}.weight"] = _part(hf[f"{theirs}{name}.weight"], 0, at.tp, layout.tp)
    local[f"{ours}linear_proj.weight"] = _part(hf[f"{theirs}o_proj.weight"], 1, at.tp, layout.tp)
    return {name: tensor for name, tensor in local.items() if tensor is not None} | indexers.local(hf, theirs, ours)


def _grouped_attention(
    hf: Tensors, config: dict[str, object], theirs: str, ours: str, layout: TrainLayout, at: Coordinates
) -> Tensors:
    """Fuse q, k and v in Megatron's order: for each group its q heads, its k head, its v head."""
    groups = config["num_key_value_heads"]
    local = {f"{ours}linear_proj.weight": _part(hf[f"{theirs}o_proj.weight"], 1, at.tp, layout.tp)}
    for kind in ("weight", "bias"):
        if f"{theirs}q_proj.{kind}" in hf:
            parts = [hf[f"{theirs}{part}_proj.{kind}"].unflatten(0, (groups, -1)) for part in "qkv"]
            if has_nets(config):  # each head has [query; gate]
                queries_and_gates = parts[0].unflatten(1, (-1, 2, config["head_dim"]))
                parts[:1] = [part.flatten(1, 2) for part in queries_and_gates.unbind(2)]
            local[f"{ours}linear_qkv.{kind}"] = _part(torch.cat(parts, 1).flatten(0, 1), 0, at.tp, layout.tp)
    for part in "qk":
        norm = hf.get(f"{theirs}{part}_norm.weight")
        if norm is not None:
            over_heads = len(norm) > config["head_dim"]  # divided like the heads
            local[f"{ours}{part}_layernorm.weight"] = _part(norm, 0, at.tp, layout.tp) if over_heads else norm
    return local


def _mlp(hf: Tensors, theirs: str, ours: str, layout: TrainLayout, at: Coordinates) -> Tensors:
    def gated(name: str, fc1: str, fc2: str, index: int, size: int) -> Tensors:
        parts = MIXTRAL_PARTS if f"{theirs}{name}w1.weight" in hf else LLAMA_PARTS
        gate, up, down = (hf[f"{theirs}{name}{part}.weight"] for part in parts)
        joined = torch.cat([_part(gate, 0, index, size), _part(up, 0, index, size)])
        return {f"{ours}{fc1}": joined, f"{ours}{fc2}": _part(down, 1, index, size)}

    if f"{theirs}gate.weight" not in hf:
        return gated("", "linear_fc1.weight", "linear_fc2.weight", at.tp, layout.tp)
    local = {f"{ours}router.weight": hf[f"{theirs}gate.weight"]}
    for shared in ("shared_experts.", "shared_expert."):
        if f"{theirs}{shared}gate_proj.weight" in hf:
            fused = ("shared_experts.linear_fc1.weight", "shared_experts.linear_fc2.weight")
            local |= gated(shared, *fused, at.tp, layout.tp)
    if f"{theirs}shared_expert_gate.weight" in hf:
        local[f"{ours}shared_experts.gate_weight"] = hf[f"{theirs}shared_expert_gate.weight"]
    for prefix in ("gate.", "moe_statics.", ""):
        if f"{theirs}{prefix}e_score_correction_bias" in hf:
            local[f"{ours}router.expert_bias"] = hf[f"{theirs}{prefix}e_score_correction_bias"]
    held = len(hf[f"{theirs}gate.weight"]) // layout.ep
    for e in range(at.ep * held, (at.ep + 1) * held):
        names = (f"experts.linear_fc1.weight{e}", f"experts.linear_fc2.weight{e}")
        local |= gated(f"experts.{e}.", *names, at.etp, layout.etp)
    return local
