"""Tiny models, and an oracle that builds each rank's tensors without the weight table, head by head."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from model_converters.mapping.layout import Coordinates, TrainLayout
from tests.unit.converters import hybrid_models

Tensors = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]

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
QWEN2_MOE = {**MOE, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 8}
MIXTRAL = {
    **DENSE,
    "model_type": "mixtral",
    "intermediate_size": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
_COMMON: dict[str, object] = {
    "vocab_size": 24,
    "hidden_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 20,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 4,
    "first_k_dense_replace": 2,
    "routed_scaling_factor": 2.5,
}
_LATENT: dict[str, object] = {
    "num_key_value_heads": 8,
    "q_lora_rank": 5,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 3,
}
_SIGMOID: dict[str, object] = {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "num_nextn_predict_layers": 1}
FAMILY_CONFIGS: dict[str, dict[str, object]] = {
    "qwen3": DENSE,
    "qwen3_moe": MOE,
    "qwen2": {**DENSE, "model_type": "qwen2"},
    "qwen2_moe": QWEN2_MOE,
    "seed_oss": {**DENSE, "model_type": "seed_oss", "attention_bias": True, "mlp_bias": False},
    "llama": {**DENSE, "model_type": "llama"},
    "mixtral": MIXTRAL,
    "deepseek_v2": {**_COMMON, **_LATENT, "model_type": "deepseek_v2", "q_lora_rank": None, "topk_method": "greedy"},
    "deepseek_v3": {**_COMMON, **_LATENT, **_SIGMOID, "model_type": "deepseek_v3"},
    "glm4_moe": {
        **_COMMON,
        **_SIGMOID,
        "model_type": "glm4_moe",
        "num_key_value_heads": 4,
        "head_dim": 6,
        "attention_bias": True,
        "use_qk_norm": True,
    },
    "minimax_m2": {
        **DENSE,
        "model_type": "minimax_m2",
        "num_key_value_heads": 4,
        "intermediate_size": 4,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rotary_dim": 4,
    },
    "ernie4_5_moe": {
        **DENSE,
        "model_type": "ernie4_5_moe",
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_intermediate_size": 4,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 3,
        "moe_layer_interval": 2,
    },
    "gpt_oss": {
        **DENSE,
        "model_type": "gpt_oss",
        "attention_bias": True,
        "intermediate_size": 12,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "glm4_moe_lite": {
        **_COMMON,
        **_LATENT,
        **_SIGMOID,
        "model_type": "glm4_moe_lite",
        "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
    },
    "kimi_k2": {**_COMMON, **_LATENT, **_SIGMOID, "model_type": "kimi_k2", "num_nextn_predict_layers": 0},
    **hybrid_models.CONFIGS,
}
LLAMA_PARTS, MIXTRAL_PARTS = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")


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


@pytest.fixture
def random_hf() -> Callable[..., Tensors]:
    return _random_hf


@pytest.fixture
def local_mcore() -> Callable[[Tensors, dict, TrainLayout, int], Tensors]:
    return _local_mcore


def _random_hf(config: dict[str, object], seed: int = 0) -> Tensors:
    """Return random HF tensors of a model of any family, built without the table."""
    generator = torch.Generator().manual_seed(seed)
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    mtp = () if _has_nets(config) else _mtp_layers(config)
    shapes: Shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(layers + len(mtp)):
        named = _attention_shapes(config, layer) | _mlp_shapes(config, layer)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in named.items()}
    if _has_nets(config) and _mtp_layers(config):
        named = _attention_shapes(config, layers - 1) | _mlp_shapes(config, layers - 1)
        shapes |= {f"mtp.layers.0.{name}": shape for name, shape in named.items()}
        shapes |= {f"mtp.{name}.weight": (hidden,) for name in hybrid_models.MTP_NAMES}
        shapes["mtp.fc.weight"] = (hidden, 2 * hidden)
    for layer in mtp:
        for name in ("enorm", "hnorm", "shared_head.norm"):
            shapes[f"model.layers.{layer}.{name}.weight"] = (hidden,)
        shapes[f"model.layers.{layer}.eh_proj.weight"] = (hidden, 2 * hidden)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for layer in mtp:
        tensors[f"model.layers.{layer}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"model.layers.{layer}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return tensors


def _mtp_layers(config: dict[str, object]) -> range:
    layers = config["num_hidden_layers"]
    count = config.get("num_nextn_predict_layers", config.get("mtp_num_hidden_layers", 0))
    return range(layers, layers + count)


def _has_nets(config: dict[str, object]) -> bool:
    return "linear_num_key_heads" in config


def _attention_shapes(config: dict[str, object], layer: int) -> Shapes:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    norms = {f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    if _has_nets(config) and config["layer_types"][layer] == "linear_attention":
        return norms | hybrid_models.net_shapes(config["model_type"], hidden)
    if "kv_lora_rank" not in config:
        d, groups = config["head_dim"], config["num_key_value_heads"]
        has_bias = config["attention_bias"] or config["model_type"].startswith("qwen2")
        has_norms = config.get("use_qk_norm") or config["model_type"].startswith(("qwen3", "minimax"))
        rows = {"q": heads * d * (2 if _has_nets(config) else 1), "k": groups * d, "v": groups * d}
        norm_sizes = rows if config["model_type"] == "minimax_m2" else {"q": d, "k": d}
        return {
            **norms,
            **{f"self_attn.{part}_proj.weight": (size, hidden) for part, size in rows.items()},
            **{f"self_attn.{part}_proj.bias": (size,) for part, size in rows.items() if has_bias},
            **{f"self_attn.{part}_norm.weight": (norm_sizes[part],) for part in "qk" if has_norms},
            "self_attn.o_proj.weight": (hidden, heads * d),
        }
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    query = {"q_proj": (heads * (nope + rope), hidden)}
    if q_rank:
        query = {"q_a_proj": (q_rank, hidden), "q_b_proj": (heads * (nope + rope), q_rank)}
        norms["self_attn.q_a_layernorm.weight"] = (q_rank,)
    norms["self_attn.kv_a_layernorm.weight"] = (kv_rank,)
    projections = query | {
        "kv_a_proj_with_mqa": (kv_rank + rope, hidden),
        "kv_b_proj": (heads * (nope + value), kv_rank),
        "o_proj": (hidden, heads * value),
    }
    return norms | {f"self_attn.{name}.weight": shape for name, shape in projections.items()}


def _mlp_shapes(config: dict[str, object], layer: int) -> Shapes:
    kind = config["model_type"]
    mixtral = kind in ("mixtral", "minimax_m2")
    block, (gate, up, down) = ("block_sparse_moe.", MIXTRAL_PARTS) if mixtral else ("mlp.", LLAMA_PARTS)
    hidden, widths = config["hidden_size"], {block: config.get("intermediate_size")}
    number_keys = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    counts = [config[key] for key in number_keys if key in config]
    dense = layer < config.get("first_k_dense_replace", 0) or layer in config.get("mlp_only_layers", ())
    dense |= kind == "ernie4_5_moe" and layer % 2 == 0  # moe_layer_interval 2 counts from 1
    shapes: Shapes = {}
    if counts and not dense:
        size = config.get("moe_intermediate_size", config.get("intermediate_size"))
        widths = {f"{block}experts.{expert}.": size for expert in range(counts[0])}
        shapes[f"{block}gate.weight"] = (counts[0], hidden)
        shared = config.get("n_shared_experts", config.get("moe_num_shared_experts"))
        if shared:
            widths["mlp.shared_experts."] = size * shared
        corrections = {"minimax_m2": block, "ernie4_5_moe": "mlp.moe_statics."}
        name = corrections.get(kind, "mlp.gate." if "n_shared_experts" in config and kind != "deepseek_v2" else "")
        if name:
            shape = (1, counts[0]) if kind == "ernie4_5_moe" else (counts[0],)
            shapes[f"{name}e_score_correction_bias"] = shape
        if "shared_expert_intermediate_size" in config:
            widths["mlp.shared_expert."] = config["shared_expert_intermediate_size"]
            shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
    for prefix, width in widths.items():
        shapes[f"{prefix}{gate}.weight"] = shapes[f"{prefix}{up}.weight"] = (width, hidden)
        shapes[f"{prefix}{down}.weight"] = (hidden, width)
    return shapes


def _local_mcore(hf: Tensors, config: dict[str, object], layout: TrainLayout, rank: int) -> Tensors:
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
        if _has_nets(config) and _mtp_layers(config):
            local |= _separate_mtp(hf, config, layout, at)
            return local
        for depth, layer in enumerate(_mtp_layers(config)):
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
    local = {
        f"{ours}input_layernorm.weight": hf[f"{theirs}input_layernorm.weight"],
        f"{ours}pre_mlp_layernorm.weight": hf[f"{theirs}post_attention_layernorm.weight"],
    }
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
    return {name: tensor for name, tensor in local.items() if tensor is not None}


def _grouped_attention(
    hf: Tensors, config: dict[str, object], theirs: str, ours: str, layout: TrainLayout, at: Coordinates
) -> Tensors:
    """Fuse q, k and v in Megatron's order: for each group its q heads, its k head, its v head."""
    groups = config["num_key_value_heads"]
    local = {f"{ours}linear_proj.weight": _part(hf[f"{theirs}o_proj.weight"], 1, at.tp, layout.tp)}
    for kind in ("weight", "bias"):
        if f"{theirs}q_proj.{kind}" in hf:
            parts = [hf[f"{theirs}{part}_proj.{kind}"].unflatten(0, (groups, -1)) for part in "qkv"]
            if _has_nets(config):  # each head has [query; gate]
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
