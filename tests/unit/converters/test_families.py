"""Weight tables compared with models and files of transformers, and rejected configurations."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest
import torch
import transformers

from model_converters.errors import ConversionError
from model_converters.families import FAMILIES, family_for
from model_converters.families.parts.family import REFUSED_BY_ALL
from model_converters.mapping.completeness import check_complete
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.plan import export_plan
from tests.exported import export_through
from tests.plans import assert_tiled
from tests.tiny_models import LLAMA3
from tests.unit.converters.hf_models import bound_rows

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 6,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 3,
    "head_dim": 2,
}
SHARED_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 12,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
SIGMOID = {**SHARED_EXPERTS, "n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 0}
MODELS = {
    "llama": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "dense": ("Qwen3", {}),
    "dense-tied": ("Qwen3", {"tie_word_embeddings": True}),
    "moe": ("Qwen3Moe", EXPERTS),
    "mixtral-moe": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-moe-tied": ("Mixtral", {"num_local_experts": 4, "tie_word_embeddings": True, "head_dim": 4}),
    "moe-dense-layers": ("Qwen3Moe", {**EXPERTS, "mlp_only_layers": [0], "decoder_sparse_step": 2}),
    "moe-deepseek-v2": ("DeepseekV2", {**LATENT, **SHARED_EXPERTS, "q_lora_rank": None}),
    "moe-deepseek-v3": ("DeepseekV3", {**LATENT, **SIGMOID}),
    "moe-glm4": ("Glm4Moe", {**SIGMOID, "attention_bias": True, "use_qk_norm": True}),
    "moe-glm4-tied": ("Glm4Moe", {**SIGMOID, "tie_word_embeddings": True}),
}


def weights_of(model):
    """Yield the parameters and the saved buffers."""
    yield from model.parameters()
    yield from (buffer for name, buffer in model.named_buffers() if name.endswith("correction_bias"))


def saved_by_transformers(name, directory):
    """Save a random model with transformers 5."""
    kind, options = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(SIZES | options))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for tensor in weights_of(model):
        torch.nn.init.normal_(tensor, std=0.3)  # transformers initialises biases to 0, which would hide errors
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_export_gives_same_logits_in_transformers(name, tmp_path):
    model = saved_by_transformers(name, tmp_path / "hf")
    layout = TrainLayout(4, tp=2, pp=2, ep=2 if "moe" in name else 1)
    # Loading compares the names of the table and of the checkpoint.
    export_through(tmp_path / "hf", tmp_path / "out", layout)
    exported = type(model).from_pretrained(tmp_path / "out").eval()
    tokens = torch.randint(0, 40, (2, 9))
    with torch.no_grad():
        assert torch.equal(exported(tokens).logits, model(tokens).logits)


def test_export_config_adds_missing_engine_fields(tmp_path):
    saved_by_transformers("moe-deepseek-v3", tmp_path / "hf")
    export_through(tmp_path / "hf", tmp_path / "out", TrainLayout(2, tp=2))
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "out"))
    added = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    assert after == before | added
    assert not added.keys() & before.keys()


def test_model_arguments_dense_model_match_transformers(tmp_path):
    model = saved_by_transformers("dense-tied", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    arguments = family_for(config).model_arguments(config)
    assert arguments.tied_embeddings
    assert arguments.vocab_size == 40
    assert arguments.max_position_embeddings == 64
    # transformers' rotary module is the reference for the base.
    inverse = 1.0 / arguments.rotary.base ** (torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, inverse)
    expected = {
        "num_layers": 4,
        "hidden_size": 16,
        "ffn_hidden_size": 24,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 8,
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


def test_qwen3_moe_dense_layers_match_transformers(tmp_path):
    model = saved_by_transformers("moe-dense-layers", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    transformer = family_for(config).model_arguments(config).transformer
    sparse = [int(hasattr(layer.mlp, "experts")) for layer in model.model.layers]
    assert transformer["moe_layer_freq"] == sparse
    assert 0 < sum(sparse) < 4
    assert transformer["num_moe_experts"] == 4
    assert transformer["moe_router_topk"] == 2
    assert transformer["moe_ffn_hidden_size"] == 12


@pytest.mark.parametrize("normalised", [True, False])
def test_softmax_routing_weights_match_transformers(normalised, moe_config):
    config = moe_config | {"norm_topk_prob": normalised}
    transformer = family_for(config).model_arguments(config).transformer
    router_config = transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=normalised)
    router = transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeTopKRouter(router_config)
    torch.nn.init.normal_(router.weight)
    hidden = torch.randn(7, 16)
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
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not supported"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope type 'llama3' is not supported"),
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
    config = family_configs[family]
    FAMILIES[family].model_arguments(config)
    for field, refused in FAMILIES[family].description.refused.items():
        assert_rejected(config, {field: refused}, {"rope_scaling": "rope type"}.get(field, field))
    for field, refused in REFUSED_BY_ALL.items():
        with pytest.raises(ConversionError, match=field):
            FAMILIES[family].rows(config | {field: refused})
    FAMILIES[family].model_arguments(config | {"is_causal": True, "dual_chunk_attention_config": None})
    assert_rejected(config, {"is_causal": None}, "is_causal")


def test_family_for_unknown_type_lists_supported_types():
    with pytest.raises(ConversionError, match=r"'gemma' is not supported; known: .*qwen3, qwen3_moe"):
        family_for({"model_type": "gemma"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": LLAMA3 | {"low_freq_factor": 2.0}}, "low_freq_factor 2.0 is not supported, only 1"),
        (
            {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 4096}},
            "original_max_position_embeddings 4096 is not supported, only 8192",
        ),
        ({"rope_parameters": LLAMA3 | {"factor": None}}, "has factor None"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "only 'default' and 'llama3'"),
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
