"""Tiny models, and an oracle that builds each rank's tensors without the weight table, head by head."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from model_converters.mapping.layout import TrainLayout
from tests.unit.converters import deepseek_oracle

Tensors = dict[str, torch.Tensor]

DENSE = {
    "model_type": "qwen3",
    "vocab_size": 23,  # no tp divides it
    "hidden_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,  # fewer than tp 4
    "head_dim": 6,
    "intermediate_size": 20,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": None,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
MOE = {
    **DENSE,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
}
MIXTRAL = {
    **DENSE,
    "model_type": "mixtral",
    "intermediate_size": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
LLAMA_PARTS, MIXTRAL_PARTS = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")


FAMILY_CONFIGS = {
    "qwen3": DENSE,
    "qwen3_moe": MOE,
    "qwen2": {**DENSE, "model_type": "qwen2"},
    "llama": {**DENSE, "model_type": "llama"},
    "mixtral": MIXTRAL,
    **deepseek_oracle.CONFIGS,
}


@pytest.fixture
def family_configs() -> dict[str, dict]:
    """Return model_type -> tiny configuration, for every family."""
    return {name: dict(config) for name, config in FAMILY_CONFIGS.items()}


@pytest.fixture
def dense_config() -> dict:
    return dict(DENSE)


@pytest.fixture
def moe_config() -> dict:
    return dict(MOE)


def _random_hf(config: dict, seed: int = 0) -> Tensors:
    """Return random HF tensors of a model of any family, built without the table."""
    if config["model_type"] in deepseek_oracle.CONFIGS:
        return deepseek_oracle.random_hf(config, seed)
    generator = torch.Generator().manual_seed(seed)
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    q_rows, kv_rows = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
            f"{prefix}self_attn.q_proj.weight": (q_rows, hidden),
            f"{prefix}self_attn.k_proj.weight": (kv_rows, hidden),
            f"{prefix}self_attn.v_proj.weight": (kv_rows, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, q_rows),
        }
        if config["model_type"].startswith("qwen3"):
            shapes |= {f"{prefix}self_attn.{part}_norm.weight": (head_dim,) for part in "qk"}
        if config["model_type"] == "qwen2":
            for part, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
                shapes[f"{prefix}self_attn.{part}_proj.bias"] = (rows,)
        mlps = {f"{prefix}mlp.": config["intermediate_size"]}
        if config["model_type"] == "qwen3_moe" and layer not in config["mlp_only_layers"]:
            shapes[f"{prefix}mlp.gate.weight"] = (config["num_experts"], hidden)
            experts = range(config["num_experts"])
            mlps = {f"{prefix}mlp.experts.{expert}.": config["moe_intermediate_size"] for expert in experts}
        gate, up, down = LLAMA_PARTS
        if config["model_type"] == "mixtral":
            block = f"{prefix}block_sparse_moe."
            shapes[f"{block}gate.weight"] = (config["num_local_experts"], hidden)
            mlps = {f"{block}experts.{e}.": config["intermediate_size"] for e in range(config["num_local_experts"])}
            gate, up, down = MIXTRAL_PARTS
        for name, size in mlps.items():
            shapes[f"{name}{gate}.weight"] = shapes[f"{name}{up}.weight"] = (size, hidden)
            shapes[f"{name}{down}.weight"] = (hidden, size)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _fuse_qkv(hf: Tensors, prefix: str, config: dict, kind: str) -> torch.Tensor:
    """Fuse q, k and v in Megatron's order: for each group its q heads, its k head, its v head."""
    head_dim, groups = config["head_dim"], config["num_key_value_heads"]
    per_group = config["num_attention_heads"] // groups
    rows = []
    for group in range(groups):
        for head in range(group * per_group, (group + 1) * per_group):
            rows.append(hf[f"{prefix}q_proj.{kind}"][head * head_dim : (head + 1) * head_dim])
        for part in "kv":
            rows.append(hf[f"{prefix}{part}_proj.{kind}"][group * head_dim : (group + 1) * head_dim])
    return torch.cat(rows)


def _column(tensor: torch.Tensor, index: int, size: int) -> torch.Tensor:
    return tensor.chunk(size, dim=0)[index]


def _vocabulary(tensor: torch.Tensor, index: int, size: int) -> torch.Tensor:
    """Append zero rows until the ranks' shares are equal, and return one share."""
    while len(tensor) % size:
        tensor = torch.cat([tensor, torch.zeros_like(tensor[:1])])
    return _column(tensor, index, size)


def _row(tensor: torch.Tensor, index: int, size: int) -> torch.Tensor:
    return tensor.chunk(size, dim=1)[index]


def _gated(hf: Tensors, ours: tuple[str, str], theirs: str, index: int, size: int) -> Tensors:
    parts = MIXTRAL_PARTS if f"{theirs}w1.weight" in hf else LLAMA_PARTS
    gate, up, down = (hf[f"{theirs}{part}.weight"] for part in parts)
    return {
        ours[0]: torch.cat([_column(gate, index, size), _column(up, index, size)]),
        ours[1]: _row(down, index, size),
    }


def _local_mcore(hf: Tensors, config: dict, layout: TrainLayout, rank: int) -> Tensors:
    """Return the tensors of Megatron's parallel layers on `rank`."""
    if config["model_type"] in deepseek_oracle.CONFIGS:
        return deepseek_oracle.local_mcore(hf, config, layout, rank)
    at = layout.coordinates(rank)
    embedding = hf["model.embed_tokens.weight"]
    head = embedding if config["tie_word_embeddings"] else hf["lm_head.weight"]
    local: Tensors = {}
    if at.pp == 0:
        local["embedding.word_embeddings.weight"] = _vocabulary(embedding, at.tp, layout.tp)
    for layers in layout.stage_layers(config["num_hidden_layers"])[at.pp]:
        for layer in layers:
            local |= _local_layer(hf, config, layout, at, layer)
    if at.pp == layout.pp - 1:
        local["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
        if not config["tie_word_embeddings"] or layout.pp > 1:
            local["output_layer.weight"] = _vocabulary(head, at.tp, layout.tp)
    return local


def _local_layer(hf: Tensors, config: dict, layout: TrainLayout, at, layer: int) -> Tensors:
    ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    local = {
        f"{ours}input_layernorm.weight": hf[f"{theirs}input_layernorm.weight"],
        f"{ours}pre_mlp_layernorm.weight": hf[f"{theirs}post_attention_layernorm.weight"],
        f"{ours}self_attention.linear_qkv.weight": _column(
            _fuse_qkv(hf, f"{theirs}self_attn.", config, "weight"), at.tp, layout.tp
        ),
        f"{ours}self_attention.linear_proj.weight": _row(hf[f"{theirs}self_attn.o_proj.weight"], at.tp, layout.tp),
    }
    for part in "qk":
        if f"{theirs}self_attn.{part}_norm.weight" in hf:
            local[f"{ours}self_attention.{part}_layernorm.weight"] = hf[f"{theirs}self_attn.{part}_norm.weight"]
    if f"{theirs}self_attn.q_proj.bias" in hf:
        bias = _fuse_qkv(hf, f"{theirs}self_attn.", config, "bias")
        local[f"{ours}self_attention.linear_qkv.bias"] = _column(bias, at.tp, layout.tp)
    block = f"{theirs}{'block_sparse_moe' if config['model_type'] == 'mixtral' else 'mlp'}."
    if f"{block}gate.weight" not in hf:
        names = (f"{ours}mlp.linear_fc1.weight", f"{ours}mlp.linear_fc2.weight")
        return local | _gated(hf, names, block, at.tp, layout.tp)
    local[f"{ours}mlp.router.weight"] = hf[f"{block}gate.weight"]
    held = len(local[f"{ours}mlp.router.weight"]) // layout.ep
    for expert in range(at.ep * held, (at.ep + 1) * held):
        names = (f"{ours}mlp.experts.linear_fc1.weight{expert}", f"{ours}mlp.experts.linear_fc2.weight{expert}")
        local |= _gated(hf, names, f"{block}experts.{expert}.", at.etp, layout.etp)
    return local


@pytest.fixture
def random_hf() -> Callable[..., Tensors]:
    return _random_hf


@pytest.fixture
def local_mcore() -> Callable[[Tensors, dict, TrainLayout, int], Tensors]:
    return _local_mcore
