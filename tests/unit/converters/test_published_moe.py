"""Published models: parameter counts, effect of every field of config.json, and a row for every tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path

import pytest
import torch

from model_converters.errors import ConversionError
from model_converters.families import family_for
from model_converters.families.parts.rotary import RotarySettings
from model_converters.families.parts.rotary_scaling import Llama3
from tests.unit.converters.hf_models import bound_rows
from tests.unit.converters.published_configs import PUBLISHED

YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
IGNORED_BY_THE_MATHS = {
    "architectures": ["OtherForCausalLM"],
    "auto_map": {},
    "bos_token_id": 7,
    "eos_token_id": 7,
    "use_cache": False,
    "transformers_version": "0",
    **dict.fromkeys(
        ("dtype", "torch_dtype"), "float32"
    ),  # dtype of the file; the caller chooses the dtype of the model
    "ep_size": 4,
    "pad_token_id": 3,
    "qk_head_dim": 8,  # computed by transformers
    "pretraining_tp": 4,
    "seq_aux": False,  # part of DeepSeek's auxiliary loss, with aux_loss_alpha
    "aux_loss_alpha": 0.5,
}
DEEPSEEK_V3: dict[str, object] = {
    **LATENT,
    **{key: value for key, value in IGNORED_BY_THE_MATHS.items() if key not in ("seq_aux", "aux_loss_alpha")},
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
DEEPSEEK_V2_LITE: dict[str, object] = {
    **{key: value for key, value in DEEPSEEK_V3.items() if key != "num_nextn_predict_layers"},
    **IGNORED_BY_THE_MATHS,
    "model_type": "deepseek_v2",
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}
# Sizes of MiniMaxAI/MiniMax-M2, baidu/ERNIE-4.5-21B-A3B-PT and baidu/ERNIE-4.5-300B-A47B-PT. Those of the first two
# are the defaults of transformers' configuration classes.
MINIMAX_M2: dict[str, object] = {
    "model_type": "minimax_m2",
    "attention_dropout": 0.0,
    "attn_type_list": [1] * 62,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "initializer_range": 0.02,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "tie_word_embeddings": False,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}
ERNIE_21B: dict[str, object] = {
    "model_type": "ernie4_5_moe",
    "hidden_act": "silu",
    "hidden_size": 2560,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_layer_interval": 1,
    "moe_layer_start_index": 1,
    "moe_norm_min": 1e-12,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "num_attention_heads": 20,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "use_bias": False,
    "vocab_size": 103424,
}
# The file of the hub was not available: sizes are compared with the published number of parameters only.
ERNIE_300B: dict[str, object] = ERNIE_21B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "moe_intermediate_size": 3584,
    "moe_k": 8,
    "moe_layer_start_index": 3,
    "moe_num_shared_experts": 0,
    "num_attention_heads": 64,
    "num_hidden_layers": 54,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
SHARED = Path(__file__).parents[3].parent / "shared" / "data"
HUB = {
    "deepseek-ai--DeepSeek-V3": {},
    "deepseek-ai--DeepSeek-R1": {},
    "moonshotai--Kimi-K2-Instruct": {},
    "glm-4.5-355b": {"model_type": "glm4_moe"},
    "deepseek-ai--DeepSeek-V3.2": {},
    "zai-org--GLM-5": {},
}
BILLIONS = {
    "DeepSeek-V3": 684.490,  # multi-token prediction included, with its copies of embedding and head
    "DeepSeek-V2-Lite": 15.706,
    "MiniMax-M2": 228.690,
    "ERNIE-4.5-21B-A3B": 21.825,
    "ERNIE-4.5-300B-A47B": 299.484,
    "deepseek-ai--DeepSeek-V3": 684.490,
    "deepseek-ai--DeepSeek-R1": 684.490,
    "moonshotai--Kimi-K2-Instruct": 1026.408,
    "glm-4.5-355b": 352.798,
    "deepseek-ai--DeepSeek-V3.2": 685.355,
    "zai-org--GLM-5": 755.767,
    "Moonlight-16B-A3B": 15.960,
    "GLM-4.7-Flash": 31.221,
    "Qwen1.5-MoE-A2.7B": 14.316,
    "Qwen2-57B-A14B": 57.409,
    "Seed-OSS-36B": 36.151,
}
OTHER_BILLIONS = {
    "Qwen--Qwen3-0.6B": 0.596,
    "Qwen--Qwen3-8B": 8.191,
    "Qwen--Qwen3-30B-A3B": 30.532,
    "Qwen--Qwen3-235B-A22B": 235.094,
    "Qwen2.5-7B": 7.616,
    "Qwen2.5-32B": 32.764,
    "meta-llama--Meta-Llama-3.1-8B": 8.030,
    "mistralai--Mixtral-8x7B-v0.1": 46.703,
    "mistralai--Mixtral-8x22B-v0.1": 140.621,
}
STACKED_BILLIONS = {"openai--gpt-oss-20b": 20.915, "openai--gpt-oss-120b": 116.829}


def published(name: str) -> dict[str, object]:
    known = {
        "DeepSeek-V3": DEEPSEEK_V3,
        "DeepSeek-V2-Lite": DEEPSEEK_V2_LITE,
        "MiniMax-M2": MINIMAX_M2,
        "ERNIE-4.5-21B-A3B": ERNIE_21B,
        "ERNIE-4.5-300B-A47B": ERNIE_300B,
        **PUBLISHED,
    }
    if name in known:
        return dict(known[name])
    if not SHARED.is_dir():
        pytest.skip("needs the hub's own config.json files")
    return json.loads((SHARED / "hf_configs" / f"{name}_config.json").read_text()) | HUB.get(name, {})


def meaning(config: Mapping[str, object]) -> object:
    """Return everything that depends on a configuration, or its error message."""
    try:
        return family_for(config).rows(config), family_for(config).model_arguments(config)
    except ConversionError as error:
        return str(error)


@pytest.mark.parametrize(("name", "billions"), (BILLIONS | OTHER_BILLIONS | STACKED_BILLIONS).items())
def test_published_config_has_published_parameter_count(name, billions):
    config = published(name)
    bound = bound_rows(config, torch.bfloat16)
    elements = {name: prod(shape) for row in bound for name, shape in zip(row.hf, row.row.shapes, strict=True)}
    assert round(sum(elements.values()) / 1e9, 3) == billions
    if name in OTHER_BILLIONS:
        rotary = RotarySettings(5e5, scaling=Llama3(8.0, 1.0, 4.0, 8192)) if "Llama" in name else RotarySettings(1e6)
        assert family_for(config).model_arguments(config).rotary == rotary


def other_values(value: object) -> list[object]:
    """Return other values of the field's type."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1]
    if isinstance(value, dict):
        return [value | {key: other} for key, inner in value.items() for other in other_values(inner)]
    return ["other"] if isinstance(value, str) else [16]


@pytest.mark.parametrize("name", BILLIONS)
def test_published_config_every_field_has_effect_or_is_inert(name):
    config = published(name)
    usual = meaning(config)
    assert not isinstance(usual, str), usual
    # Greedy routing ignores groups.
    unread = {"n_group", "topk_group"} if config.get("topk_method") == "greedy" else set()
    for field, value in config.items():
        if field in unread:
            continue
        if field in IGNORED_BY_THE_MATHS:
            assert meaning(config | {field: IGNORED_BY_THE_MATHS[field]}) == usual, field
            continue
        for other in other_values(value):
            assert meaning(config | {field: other}) != usual, f"{field}={other} changes nothing"


@pytest.mark.parametrize("key", ["index_topk", "index_n_heads", "index_head_dim"])
def test_sparse_attention_field_is_rejected_for_any_model_type(key):
    assert key in meaning(DEEPSEEK_V3 | {key: 64})


def expanded(rows: list[dict[str, object]]) -> dict[str, tuple[int, ...]]:
    """Return name -> shape for name patterns with inclusive ranges of layers and experts."""

    def inclusive(bounds: list[int] | None) -> range:
        return range(bounds[0], bounds[1] + 1) if bounds else range(1)

    return {
        row["pattern"].replace("{L}", str(layer)).replace("{E}", str(expert)): tuple(row["shape"])
        for row in rows
        for layer in inclusive(row["layers"])
        for expert in inclusive(row["experts"])
    }


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the published table of tensors")
def test_deepseek_v3_published_index_matches_table():
    table = json.loads((SHARED / "tensor_tables" / "deepseek_v3_671b.json").read_text())["rows"]
    weights = [row for row in table if not row["pattern"].endswith("weight_scale_inv")]
    bound = bound_rows(published("deepseek-ai--DeepSeek-V3"), torch.bfloat16)
    found = [(name, shape) for row in bound for name, shape in zip(row.hf, row.row.shapes, strict=True)]
    assert len(found) == 46_183
    assert dict(found) == expanded(weights)
    blocks = {row["pattern"] for row in weights if row["dtype"] == "float8_e4m3fn"}
    fp8 = {name for row in bound if row.row.fp8 for name in row.hf}
    assert fp8 == expanded([row for row in weights if row["pattern"] in blocks]).keys()
    wide = {row["pattern"].split(".")[-1] for row in weights if row["dtype"] == "float32"}
    assert wide == {"e_score_correction_bias"}
    assert {name.split(".")[-1] for row in bound if row.dtype == torch.float32 for name in row.hf} == wide
