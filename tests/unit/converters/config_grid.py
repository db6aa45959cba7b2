"""Settings of config.json that change a model's computation, and facts about the model that transformers builds."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from model_converters.families import FAMILIES
from model_converters.families.parts.rotary import inverse_frequencies
from model_converters.mapping.table import bind
from tests.selection import EVERY_TEST
from tests.tiny_models import GROUPS, LLAMA3, LONGROPE, YARN, checkpoint_tensors, tiny_fields

ABSENT: Any = object()
Change = dict[str, object]

_DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
_WRONG: list[object] = [ABSENT, None, 0, "x", [1], True, math.nan]
_VALUES: dict[str, list[object]] = {
    "rms_norm_eps": [*_WRONG, 1e-3],
    "attention_dropout": [ABSENT, None, "x", [1], True, math.nan, 0.1],
    "initializer_range": _WRONG,
    "tie_word_embeddings": [ABSENT, None, True, False, 0, "true"],
    "num_key_value_heads": [*_WRONG, 1, 2, 4, 2.0],
    "head_dim": [*_WRONG, 7, 8, 12],
    "hidden_act": [ABSENT, None, "gelu", 3],
    "attention_bias": [ABSENT, None, True, False, 0],
    "attention_out_bias": [ABSENT, None, True, False, 0],
    "residual_dropout": [ABSENT, None, "x", True, 0.2],
    "mlp_bias": [ABSENT, None, True, False, 0],
    "qkv_bias": [ABSENT, None, True, False, 0],
    "rope_parameters": [
        *_WRONG,
        {},
        {"rope_theta": 5e5},
        {"rope_type": "default"},
        {"type": "default", "rope_theta": 5e5},
        {"type": "linear", "factor": 2.0},
        {"rope_type": None, "rope_theta": 5e5},
        {"rope_type": "default", "type": "linear", "factor": 2.0},
        {"full_attention": _DEFAULT},
        LLAMA3,
        YARN,
    ],
    "rope_scaling": [
        *_WRONG,
        {},
        {"rope_type": "default"},
        {"rope_type": "default", "rope_theta": 5e5},
        {"type": "linear", "factor": 2.0},
        {key: value for key, value in LLAMA3.items() if key != "rope_theta"},
        YARN,
    ],
    "partial_rotary_factor": [*_WRONG, 0.5, 0.25, 1.0],
    "use_sliding_window": [None, True, 1],
    "sliding_window": [None, 0, 8],
    "layer_types": [None, 3, "x", ["full_attention"] * 2, ["sliding_attention"] * 2],
    "per_layer_config": [None, {"0": {"rms_norm_eps": 1e-2}}],
}
_EXPERTS: dict[str, list[object]] = {
    "num_experts": [*_WRONG, 4],
    "num_local_experts": [*_WRONG, 4],
    "n_routed_experts": [*_WRONG, 4],
    "num_experts_per_tok": [*_WRONG, 1, 3, 100],
    "norm_topk_prob": [ABSENT, None, True, False, 0],
    "decoder_sparse_step": [*_WRONG, 2],
    "mlp_only_layers": [ABSENT, None, [], [0], 0, ["0"]],
    "n_shared_experts": [*_WRONG, 1, 2],
    "shared_expert_intermediate_size": [*_WRONG, 8],
    "routed_scaling_factor": [*_WRONG, -1.0, 2.0],
    "n_group": [*_WRONG, 1, 2],
    "topk_group": [*_WRONG, 1, 2],
    "first_k_dense_replace": [ABSENT, None, 0, 5, "x", True],
    "scoring_func": [ABSENT, None, "softmax", "sigmoid", 3],
    "topk_method": [ABSENT, None, "greedy", "noaux_tc", 3],
    "use_qk_norm": [ABSENT, None, True, False, 0],
}
_INDEXED: dict[str, list[object]] = {
    "index_head_dim": [*_WRONG, 4, 8],
    "index_n_heads": [*_WRONG, 2],
    "index_topk": [*_WRONG, 3],
    "index_topk_freq": [1, 2, "x"],
    "index_topk_pattern": ["FF", "FS"],
    "indexer_types": [None, ["full", "full"], ["full", "shared"]],
    "layer_types": [None, ["indexed_attention"] * 2, ["full_attention"] * 2],
}
_OF_KIND: dict[str, dict[str, list[object]]] = {
    "ernie4_5_moe": {
        "moe_k": [*_WRONG, 1, 3, 100],
        "moe_num_experts": [*_WRONG, 4],
        "moe_num_shared_experts": [*_WRONG, 1],
        "moe_layer_start_index": [ABSENT, None, 0, 2, "x"],
        "moe_layer_end_index": [ABSENT, None, -1, 0, 1, 9, "x"],
        "moe_layer_interval": [*_WRONG, 2],
        "moe_norm_min": [ABSENT, None, 1e-12, 1e-6],
        "use_bias": [ABSENT, None, True, False, 0],
    },
    "gemma3_text": {
        "hidden_activation": [ABSENT, None, "silu", "gelu_pytorch_tanh"],
        "query_pre_attn_scalar": [*_WRONG, 16],
        "sliding_window": [*_WRONG, 1, 3],
        "sliding_window_pattern": [ABSENT, None, 0, "x", 1, 2],
        "layer_types": [
            ABSENT,
            [],
            ["full_attention"] * 2,
            ["full_attention", "sliding_attention"],
            ["chunked_attention"] * 2,
        ],
        "rope_local_base_freq": [*_WRONG, 5e3],
        "rope_parameters": [
            None,
            {},
            {"full_attention": _DEFAULT},
            {"full_attention": {"rope_type": "linear", "factor": 4.0}, "sliding_attention": None},
            {"sliding_attention": {"type": "linear", "factor": 2.0}},
            {"sliding_attention": YARN},
            {"full_attention": 3},
        ],
        "rope_scaling": [{"rope_type": "linear", "factor": 8.0}, {"type": "linear", "factor": 8.0}, YARN],
        "attn_logit_softcapping": [None, 30.0],
        "final_logit_softcapping": [None, 30.0],
        "use_bidirectional_attention": [None, True, False],
    },
    "gpt_oss": {
        "swiglu_limit": [*_WRONG, 2.0],
        "swiglu_alpha": [ABSENT, None, "x", 1.5, 1.702],
        "sliding_window": [*_WRONG, 1, 3],
        "layer_types": [
            ABSENT,
            [],
            ["full_attention"] * 2,
            ["full_attention", "sliding_attention"],
            ["chunked_attention"] * 2,
        ],
    },
    "deepseek_v32": _INDEXED,
    "glm_moe_dsa": _INDEXED,
    "minimax_m2": {"rotary_dim": [*_WRONG, 4, 12], "attn_type_list": [None, [1, 1], [0, 1], 3]},
}
_LATENT: dict[str, list[object]] = {
    "q_lora_rank": [*_WRONG, 8],
    "kv_lora_rank": _WRONG[1:],
    "qk_rope_head_dim": [None, 0, 4, 7],
    "v_head_dim": [None, 0, 8],
    "rope_interleave": [ABSENT, None, False, True, 0],
}
_NETS: dict[str, list[object]] = {
    "full_attention_interval": [ABSENT, 0, "x", 1, 2, 4],
    "layer_types": [None, ["linear_attention", "full_attention"], ["full_attention"] * 2, ["full_attention"] * 3],
    "linear_conv_kernel_dim": [None, 0, "x", 3],
    "linear_key_head_dim": [None, 0, "x", 4],
    "linear_value_head_dim": [None, 0, "x", 4],
    "linear_num_key_heads": [None, 0, "x", 3, 4],
    "linear_num_value_heads": [None, 0, "x", 3, 8],
    "shared_expert_intermediate_size": [ABSENT, None, "x", 24],
}
_LISTED: dict[str, list[object]] = {
    "mlp_layer_types": [None, "x", [1], ["dense"], ["dense", "sparse"], ["sparse"] * 2, ["sparse", "dense"]],
}
_YARN_VALUES: dict[str, list[object]] = {
    "rope_theta": [ABSENT, None, 0, "x", 5e5],
    "factor": [ABSENT, None, "x", 1, 8],
    "original_max_position_embeddings": [None, "x", 64],
    "beta_fast": [ABSENT, None, 0, "x", 8],
    "beta_slow": [ABSENT, None, 0, "x", 2.0],
    "mscale": [ABSENT, None, 0, "x", 0.7],
    "mscale_all_dim": [ABSENT, None, 0, "x", 1.0],
    "attention_factor": [None, 1.0, 2.0],
    "truncate": [None, True, False, 0],
    "partial_rotary_factor": [None, 0.5, 1.0],
}
_LLAMA3_VALUES: dict[str, list[object]] = {
    "rope_theta": [ABSENT, None, 0, "x", 1e4],
    "factor": [ABSENT, None, "x", 1, 4.0],
    "low_freq_factor": [ABSENT, None, "x", 2.0, 4.0],
    "high_freq_factor": [ABSENT, None, "x", 8.0],
    "original_max_position_embeddings": [ABSENT, None, "x", 0, 64],
}
_LONGROPE_VALUES: dict[str, list[object]] = {
    "factor": [ABSENT, None, 0, "x", 1, 8.0],
    "original_max_position_embeddings": [ABSENT, None, "x", 1, 32],
    "attention_factor": [None, 0, "x", 1.5],
    "short_factor": [ABSENT, None, 2.0, [], [2.0] * 7, ["x"] * 8, [2] * 8],
    "long_factor": [ABSENT, None, [2.0] * 7],
}
_SIMPLE_VALUES: dict[str, list[object]] = {
    "rope_type": ["dynamic", "su", "proportional"],
    "factor": [ABSENT, None, 0, "x", 1, 4],
    "alpha": [2.0],
    "partial_rotary_factor": [0.5],
}
_ROPES: list[tuple[dict[str, object], dict[str, list[object]]]] = [
    (YARN, _YARN_VALUES),
    (LLAMA3, _LLAMA3_VALUES),
    (LONGROPE, _LONGROPE_VALUES),
    ({"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, _SIMPLE_VALUES),
]
_TOGETHER: list[Change] = [
    {"rope_parameters": ABSENT, "rope_theta": value} for value in (*_WRONG, 5e5)
] + [
    {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}},
    {"rope_theta": 5e5, "rope_scaling": {"rope_type": "default"}},
    {"rope_theta": None, "rope_scaling": {"rope_type": "default"}},
    {"partial_rotary_factor": None, "rope_parameters": {**_DEFAULT, "partial_rotary_factor": 0.25}},
    {"partial_rotary_factor": 0.25, "rope_parameters": {**_DEFAULT, "partial_rotary_factor": None}},
    {"original_max_position_embeddings": 4096, "rope_parameters": LLAMA3},
    {"original_max_position_embeddings": 64, "rope_parameters": YARN},
    {"original_max_position_embeddings": 32, "rope_parameters": LONGROPE},
    {"original_max_position_embeddings": 64, "rope_parameters": _DEFAULT},
    {"use_sliding_window": True, "sliding_window": 8},
    {"use_sliding_window": True, "sliding_window": None},
    {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention"] * 2},
    {"topk_method": "group_limited_greedy", **GROUPS},
    {"topk_method": "group_limited_greedy", **GROUPS, "topk_group": 4},
    GROUPS,
]  # fmt: skip
_BASE = {"num_hidden_layers": 2, "intermediate_size": 24}
_BASE_BY_LIST = _BASE | {"mlp_layer_types": ["dense", "sparse"], "first_k_dense_replace": 1}


def changes(kind: str) -> Iterator[Change]:
    """Yield changes to a tiny configuration: one setting, or a few that belong together."""
    experts = _EXPERTS if kind not in ("llama", "qwen2", "qwen3", "qwen3_5_text", "seed_oss", "gemma3_text") else {}
    experts = experts | _OF_KIND.get(kind, {})
    latent = _LATENT if "kv_lora_rank" in tiny_fields(kind) else {}
    nets = _NETS if "linear_num_key_heads" in tiny_fields(kind) else {}
    listed = _LISTED if "mlp_layer_types" in tiny_fields(kind) else {}
    tables = (_VALUES, experts, latent, nets, listed)
    yield {}
    yield from ({key: value} for table in tables for key in table for value in table[key])
    for base, table in _ROPES:
        yield {"rope_parameters": base}
        # Families with grouped attention share the code: one that rotates whole heads, and one that does not.
        if kind not in ("llama", "glm4_moe") and not latent and not EVERY_TEST:
            continue
        for key, values in table.items():
            yield from ({"rope_parameters": _changed(base, {key: value})} for value in values)
    yield from _TOGETHER


def grid_fields(kind: str, change: Change) -> dict[str, object]:
    return _changed(tiny_fields(kind, **(_BASE_BY_LIST if kind == "glm4_moe_lite" else _BASE)), change)


def _changed(fields: dict[str, object], change: Change) -> dict[str, object]:
    return {key: value for key, value in {**fields, **change}.items() if value is not ABSENT}


def facts_of_transformers(fields: dict[str, object]) -> dict[str, object]:
    """Return facts about transformers' model. Raises the errors of transformers for a model that it cannot run."""
    # transformers modifies its arguments.
    config = AutoConfig.for_model(**copy.deepcopy(fields))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        model(torch.arange(12)[None])
    trunk = model.model
    shapes = {name: tuple(tensor.shape) for name, tensor in checkpoint_tensors(model, model.state_dict()).items()}
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    # A layer of a hybrid model may have linear attention.
    layer = next(layer for layer in reversed(trunk.layers) if hasattr(layer, "self_attn"))
    attention, whole_window = layer.self_attn, config.model_type in ("mixtral", "qwen3_moe")
    return {
        "shapes": shapes,
        "tied": config.tie_word_embeddings,
        "epsilon": _epsilon(layer.input_layernorm),
        "latent epsilon": attention.kv_a_layernorm.variance_epsilon if hasattr(attention, "kv_a_layernorm") else None,
        "activation": _activation(layer.mlp if hasattr(layer.mlp, "act_fn") else layer.mlp.experts),
        "attention scale": attention.scaling,
        "windows": [
            config.sliding_window if whole_window else getattr(getattr(each, "self_attn", None), "sliding_window", None)
            for each in trunk.layers
        ],
        **_rotations(trunk.rotary_emb),
        "neighbours paired": config.model_type in ("deepseek_v2", "ernie4_5_moe")
        # Pairs neighbours, whatever the field is; only the indexer of deepseek_v32 does not.
        or hasattr(attention, "indexer")
        or bool(getattr(config, "rope_interleave", False)),
        "routing": _routing(layer.mlp.gate) if hasattr(layer.mlp, "gate") else _router(layer.mlp),
    }


def _rotations(rotary: Any) -> dict[str, object]:
    """Return frequencies and the factor on cosines; of a model with two rotations, those of each kind of layer."""
    if hasattr(rotary, "inv_freq"):
        return {"frequencies": rotary.inv_freq, "cosine scale": float(rotary.attention_scaling)}
    return {
        f"{name} of {kind}": getattr(rotary, f"{kind}_{attribute}")
        for kind in rotary.layer_types
        for name, attribute in (("frequencies", "inv_freq"), ("cosine scale", "attention_scaling"))
    }


def _router(mlp: Any) -> dict[str, object] | None:
    return _routing(mlp.router) if hasattr(mlp, "router") else None


def _activation(module: Any) -> object:
    return type(module.act_fn).__name__ if hasattr(module, "act_fn") else (module.alpha, module.limit)


def _epsilon(norm: Any) -> float:
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def _routing(gate: Any) -> dict[str, object]:
    groups = (getattr(gate, "num_group", None), getattr(gate, "topk_group", None))
    limited = getattr(gate, "topk_method", "group_limited_greedy") == "group_limited_greedy"
    return {
        "experts per token": gate.top_k,
        # Mixtral always normalises, DeepSeek V2 never.
        "normalised": bool(getattr(gate, "norm_topk_prob", not hasattr(gate, "topk_method"))),
        "factor": getattr(gate, "routed_scaling_factor", 1.0),
        "groups": groups if limited and groups[0] != groups[1] else None,
    }


def facts_of_ours(fields: dict[str, object]) -> dict[str, object]:
    """Return the same facts from the family's table and arguments."""
    family = FAMILIES[fields["model_type"]]
    arguments = family.model_arguments(fields)
    sizes = arguments.transformer
    bound = bind(family.rows(fields), fields, torch.float32)
    shapes = {
        name: shape
        for row in bound
        if not row.row.copy_of_embedding
        for name, shape in zip(row.hf, row.row.shapes, strict=True)
    }
    windows = sizes.get("window_attn_skip_freq", [0] * sizes["num_layers"])
    activations = {"silu": "SiLUActivation", "quick_gelu": (1.702, sizes.get("activation_func_clamp_value"))}
    activations["gelu_tanh"] = "GELUTanh"
    latent = sizes.get("multi_latent_attention", False)
    head_dim = sizes["qk_head_dim"] + sizes["qk_pos_emb_head_dim"] if latent else sizes["kv_channels"]
    frequencies, cosine_scale, score_scale = _rotation(arguments, head_dim)
    return {
        "shapes": shapes,
        "tied": arguments.tied_embeddings,
        "epsilon": sizes["layernorm_epsilon"],
        "latent epsilon": arguments.latent_norm_epsilon,
        "activation": activations[sizes["activation_func"]],
        "attention scale": score_scale,
        "windows": [sizes["window_size"][0] + 1 if window else None for window in windows],
        "frequencies": frequencies,
        "cosine scale": cosine_scale,
        "frequencies of full_attention": frequencies,
        "cosine scale of full_attention": cosine_scale,
        "frequencies of sliding_attention": _window_frequencies(arguments),
        "cosine scale of sliding_attention": arguments.window_rotary and arguments.window_rotary.factor,
        "neighbours paired": latent or sizes.get("rotary_interleaved", False),
        "routing": _our_routing(sizes) if sizes.get("moe_layer_freq", [1])[-1] and "num_moe_experts" in sizes else None,
    }


def _window_frequencies(arguments: Any) -> torch.Tensor | None:
    rotary = arguments.window_rotary
    return rotary and inverse_frequencies(rotary, arguments.transformer["kv_channels"])


def _rotation(arguments: Any, head_dim: int) -> tuple[torch.Tensor, float, float]:
    """Return (frequencies, factor on cosines, factor on scores); for yarn by transformers, from our arguments."""
    sizes = arguments.transformer
    if sizes.get("rope_type") != "yarn":
        rotated = sizes.get("qk_pos_emb_head_dim", sizes["kv_channels"])
        scale = sizes.get("softmax_scale", head_dim**-0.5)
        return inverse_frequencies(arguments.rotary, rotated), arguments.rotary.factor, scale
    keys = ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    rope = {"rope_type": "yarn", "rope_theta": sizes["rotary_base"], "factor": sizes["rotary_scaling_factor"]}
    rope |= {key: sizes[key] for key in keys}
    config = DeepseekV3Config(qk_rope_head_dim=sizes["qk_pos_emb_head_dim"], rope_parameters=rope)
    frequencies, cosine_scale = ROPE_INIT_FUNCTIONS["yarn"](config, None)
    scale = 0.1 * sizes["mscale_all_dim"] * math.log(sizes["rotary_scaling_factor"]) + 1
    return frequencies, float(cosine_scale), scale**2 * head_dim**-0.5


def _our_routing(sizes: dict[str, object]) -> dict[str, object]:
    corrected = sizes.get("moe_router_enable_expert_bias", False)
    groups = (sizes.get("moe_router_num_groups"), sizes.get("moe_router_group_topk"))
    return {
        "experts per token": sizes["moe_router_topk"],
        "normalised": corrected or not sizes["moe_router_pre_softmax"],
        "factor": sizes.get("moe_router_topk_scaling_factor", 1.0),
        "groups": groups if groups[0] else None,
    }
