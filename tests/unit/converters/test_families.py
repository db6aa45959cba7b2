"""Weight tables compared with models and files of transformers, and rejected configurations."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from model_converters.errors import ConversionError
from model_converters.families import FAMILIES, family_for
from model_converters.families.parts.family import REFUSED_BY_ALL
from model_converters.families.refusals import REFUSED
from model_converters.hf.io import HFCheckpoint
from model_converters.mapping.completeness import check_complete
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.plan import export_plan
from model_converters.vision_model import VISION_TYPES
from tests.exported import export_through
from tests.plans import assert_tiled
from tests.tiny_models import (
    GROUPS,
    LLAMA3,
    LONGROPE,
    VOCABULARY,
    YARN,
    tiny_config,
    tiny_fields,
    tiny_model,
    write_tiny_model,
)
from tests.unit.converters.hf_models import bound_rows

DENSE = ("gemma3_text", "llama", "qwen2", "qwen2_5_vl", "qwen3", "qwen3_5", "qwen3_5_text", "qwen3_vl", "seed_oss")
MODELS = [
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {}),
    ("qwen3", {"tie_word_embeddings": True}),
    ("qwen3_moe", {}),
    ("qwen3_moe", {"mlp_only_layers": [0], "decoder_sparse_step": 2}),
    ("mixtral", {}),
    ("mixtral", {"tie_word_embeddings": True, "head_dim": 8}),
    ("deepseek_v2", {}),
    ("deepseek_v3", GROUPS),
    ("glm4_moe", {}),
    ("minimax_m2", {}),
    ("ernie4_5_moe", {"moe_layer_interval": 2}),
    ("ernie4_5_moe", {"tie_word_embeddings": True, "moe_layer_end_index": 2, "moe_num_shared_experts": 0}),
    ("qwen3_next", {"mlp_only_layers": [1]}),
    ("qwen3_5_text", {"tie_word_embeddings": True}),
    ("qwen3_5_moe_text", {}),
    ("gpt_oss", {}),
    ("gpt_oss", {"tie_word_embeddings": True, "intermediate_size": 48}),
    ("glm4_moe", {"tie_word_embeddings": True, "attention_bias": False, "use_qk_norm": False}),
    ("gemma3_text", {}),
    ("gemma3_text", {"tie_word_embeddings": True}),
    ("glm4_moe_lite", {}),
    ("glm4_moe_lite", {"mlp_layer_types": None, "first_k_dense_replace": 1, "q_lora_rank": None}),
    ("deepseek_v32", {"rope_parameters": YARN, **GROUPS}),
    ("glm_moe_dsa", {"mlp_layer_types": ["dense", "dense", "sparse", "sparse"]}),
    ("qwen2_moe", {}),
    ("qwen2_moe", {"tie_word_embeddings": True, "mlp_only_layers": [0], "qkv_bias": False}),
    ("qwen2_5_vl", {"tie_word_embeddings": True}),
    ("qwen3_vl", {}),
    ("qwen3_5", {}),
    ("qwen3_5_moe", {}),
    ("qwen3_vl_moe", {"mlp_only_layers": [0]}),
    ("seed_oss", {}),
    ("seed_oss", {"tie_word_embeddings": True, "attention_bias": False}),
]


@pytest.mark.parametrize(("kind", "changes"), MODELS)
def test_export_gives_same_logits_in_transformers(kind, changes, tmp_path):
    model = tiny_model(kind, **changes)
    model.save_pretrained(tmp_path / "hf")
    # Loading compares the names of the table and of the checkpoint.
    export_through(tmp_path / "hf", tmp_path / "out", TrainLayout(4, tp=2, pp=2, ep=1 if kind in DENSE else 2))
    exported = type(model).from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    tokens = torch.randint(0, VOCABULARY, (2, 9))
    with torch.no_grad():
        # The product with a gate's single row depends, in its last bits, on the alignment of the row in memory.
        tolerance = 1e-5 if any("shared_expert_gate" in name for name, _ in model.named_parameters()) else 0.0
        torch.testing.assert_close(exported(tokens).logits, model(tokens).logits, rtol=0, atol=tolerance)


def test_export_config_adds_missing_engine_fields(tmp_path):
    write_tiny_model(tmp_path / "hf", "deepseek_v3")
    export_through(tmp_path / "hf", tmp_path / "out", TrainLayout(2, tp=2))
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "out"))
    added = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    assert after == before | added
    assert not added.keys() & before.keys()


def test_model_arguments_dense_model_match_transformers():
    model = tiny_model("qwen3", tie_word_embeddings=True)
    config = model.config.to_dict()
    arguments = family_for(config).model_arguments(config)
    assert (arguments.tied_embeddings, arguments.vocab_size, arguments.max_position_embeddings) == (True, 96, 256)
    # transformers' rotary module is the reference for the base.
    inverse = 1.0 / arguments.rotary.base ** (torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, inverse)
    expected = {
        "num_layers": 4,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 16,
        "layernorm_epsilon": 1e-6,
        "normalization": "RMSNorm",
        "activation_func": "silu",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": 0.02,
    }
    assert arguments.transformer == expected


def test_qwen3_moe_dense_layers_match_transformers():
    model = tiny_model("qwen3_moe", mlp_only_layers=[0], decoder_sparse_step=2)
    config = model.config.to_dict()
    transformer = family_for(config).model_arguments(config).transformer
    sparse = [int(hasattr(layer.mlp, "experts")) for layer in model.model.layers]
    assert transformer["moe_layer_freq"] == sparse
    assert 0 < sum(sparse) < 4
    assert transformer["num_moe_experts"] == 8
    assert transformer["moe_router_topk"] == 2
    assert transformer["moe_ffn_hidden_size"] == 24


@pytest.mark.parametrize("normalised", [True, False])
def test_softmax_routing_weights_match_transformers(normalised, moe_config):
    config = moe_config | {"norm_topk_prob": normalised}
    transformer = family_for(config).model_arguments(config).transformer
    router_config = tiny_config("qwen3_moe", norm_topk_prob=normalised)
    router = transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeTopKRouter(router_config)
    torch.nn.init.normal_(router.weight)
    hidden = torch.randn(7, 32)
    _, wanted, chosen = router(hidden)
    logits = hidden @ router.weight.T
    # The two orders of operations in Megatron's topk_routing_with_score_function.
    if transformer["moe_router_pre_softmax"]:
        weights, experts = torch.topk(torch.softmax(logits, dim=-1), 2)
    else:
        top, experts = torch.topk(logits, 2)
        weights = torch.softmax(top, dim=-1)
    assert torch.equal(experts, chosen)
    # Tolerance: two float32 softmaxes with different summation orders.
    torch.testing.assert_close(weights, wanted, atol=1e-6, rtol=1e-6)


def assert_rejected(config, change, message):
    with pytest.raises(ConversionError, match=message):
        family_for(config | change).model_arguments(config | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"rope_type": "su", "factor": 4.0}}, "rope type 'su' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope scaling 'yarn' has factor None"),
        ({"rope_theta": None}, "rope_theta is null; it must be a number above 0"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers is '4'"),
        ({"num_attention_heads": 7}, "num_attention_heads 7 is not a multiple of num_key_value_heads 2"),
    ],
)
def test_family_unsupported_setting_is_rejected(change, message, dense_config, moe_config):
    assert_rejected(dense_config, change, message)
    assert_rejected(moe_config, change, message)


@pytest.mark.parametrize("family", FAMILIES)
def test_description_refused_fields_are_rejected_by_name(family, family_configs):
    config = tiny_fields(family) if family in VISION_TYPES else family_configs[family]
    FAMILIES[family].model_arguments(config)
    for field, refused in FAMILIES[family].description.refused.items():
        assert_rejected(config, {field: refused}, {"rope_scaling": "rope type"}.get(field, field))
    for field, refused in REFUSED_BY_ALL.items():
        with pytest.raises(ConversionError, match=field):
            FAMILIES[family].rows(config | {field: refused})
    FAMILIES[family].model_arguments(config | {"is_causal": True, "dual_chunk_attention_config": None})
    assert_rejected(config, {"is_causal": None}, "is_causal")


def test_family_for_unknown_type_lists_supported_types():
    with pytest.raises(ConversionError, match=r"'gemma' is not supported; known: .*qwen3, .*qwen3_moe"):
        family_for({"model_type": "gemma"})


@pytest.mark.parametrize("model_type", REFUSED)
def test_family_for_refused_type_names_missing_features(model_type):
    with pytest.raises(ConversionError) as raised:
        family_for({"model_type": model_type, "text_config": {"model_type": "qwen3"}})
    message = str(raised.value)
    assert f"model_type '{model_type}' ({REFUSED[model_type].models}) is not supported; missing: " in message
    assert all(feature in message for feature in REFUSED[model_type].missing)
    assert "\n" not in message


def test_ernie_checkpoint_drops_the_prediction_block_of_releases(tmp_path):
    directory = write_tiny_model(tmp_path / "hf", "ernie4_5_moe", tie_word_embeddings=True)
    tensors = load_file(directory / "model.safetensors")
    released = {"model.mtp_block.0.mlp.up_proj.weight": torch.ones(2, 2), "model.mtp_emb_norm.0.weight": torch.ones(2)}
    save_file(tensors | released, directory / "model.safetensors", metadata={"format": "pt"})
    export_through(directory, tmp_path / "out", TrainLayout(2, tp=2))
    with HFCheckpoint(directory) as checkpoint, HFCheckpoint(tmp_path / "out") as exported:
        assert checkpoint.ignored == sorted(released)
        assert exported.shapes.keys() == tensors.keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": LLAMA3 | {"low_freq_factor": 4.0}}, "high_freq_factor is 4.0; it must be above low_freq"),
        ({"rope_parameters": LLAMA3 | {"factor": None}}, "has factor None"),
        ({"rope_parameters": LONGROPE}, "short_factor must be a list of 3 numbers above 0"),
        (
            {"rope_parameters": LONGROPE | {"short_factor": [1.0] * 3}},
            "long_factor must be a list of 3 numbers above 0",
        ),
        ({"rope_parameters": YARN | {"rope_theta": 1.0}}, "rope_theta is 1, with which yarn has no frequencies"),
        ({"rope_parameters": YARN | {"truncate": 0}}, "truncate is 0; it must be true or false"),
        ({"rope_parameters": YARN | {"attention_factor": 0}}, "attention_factor is 0; it must be a number above 0"),
    ],
)
def test_llama_unsupported_setting_is_rejected(change, message, dense_config):
    assert_rejected(dense_config | {"model_type": "llama"}, change, message)


HUB = Path(__file__).parents[3].parent / "shared" / "data" / "hf_configs"


@pytest.mark.skipif(not HUB.is_dir(), reason="needs the hub's own index")
def test_mixtral_published_index_is_claimed_exactly_once():
    config = json.loads((HUB / "mistralai--Mixtral-8x22B-v0.1_config.json").read_text())
    index = json.loads((HUB / "mixtral-8x22b-layout.model.safetensors.index.json").read_text())
    bound = bound_rows(config, torch.bfloat16)
    plans = export_plan(bound, TrainLayout(8, tp=2, pp=2, ep=4))
    check_complete(bound, index["weight_map"].keys())
    assert_tiled(bound, plans)
    assert len(plans) == 1739
    assert sum(prod(plan.shape) * plan.dtype.itemsize for plan in plans) == index["metadata"]["total_size"]
