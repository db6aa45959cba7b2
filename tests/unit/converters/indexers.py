"""Indexers of DeepSeek-V3.2 and GLM-5: tensors of HF and of Megatron's layers, written without the table."""

from __future__ import annotations

import torch

MCORE_NAMES = {
    "wq_b.weight": "linear_wq_b.weight",
    "wk.weight": "linear_wk.weight",
    "k_norm.weight": "k_norm.weight",
    "k_norm.bias": "k_norm.bias",
    "weights_proj.weight": "linear_weights_proj.weight",
}


def configs(latent: dict[str, object]) -> dict[str, dict[str, object]]:
    """Return model_type -> tiny configuration. latent: fields of a DeepSeek-V3 model."""
    index = {"index_n_heads": 3, "index_head_dim": 5, "index_topk": 4}
    return {name: {**latent, **index, "model_type": name} for name in ("deepseek_v32", "glm_moe_dsa")}


def shapes(config: dict[str, object]) -> dict[str, tuple[int, ...]]:
    """Return the HF tensors of an indexer; none for a model without it."""
    if "index_topk" not in config:
        return {}
    heads, size = config["index_n_heads"], config["index_head_dim"]
    return {
        "self_attn.indexer.wq_b.weight": (heads * size, config["q_lora_rank"]),
        "self_attn.indexer.wk.weight": (size, config["hidden_size"]),
        "self_attn.indexer.k_norm.weight": (size,),
        "self_attn.indexer.k_norm.bias": (size,),
        "self_attn.indexer.weights_proj.weight": (heads, config["hidden_size"]),
    }


def local(hf: dict[str, torch.Tensor], theirs: str, ours: str) -> dict[str, torch.Tensor]:
    """Return the tensors of an indexer on every tensor-parallel rank. theirs, ours: prefixes of the attention."""
    names = {name: f"{theirs}indexer.{name}" for name in MCORE_NAMES}
    return {f"{ours}core_attention.indexer.{MCORE_NAMES[name]}": hf[at] for name, at in names.items() if at in hf}
