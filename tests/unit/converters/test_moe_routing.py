"""Routing and attention settings of DeepSeek and GLM, and rejection of settings that Megatron does not support."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from model_converters.errors import ConversionError
from model_converters.families import family_for

SIGMOID = ("deepseek_v3", "glm4_moe")


def arguments(config, **changes):
    return family_for(config | changes).model_arguments(config | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 1, "topk_group": 4}, "norm_topk_prob True with num_experts_per_tok 1"),
        ({"topk_group": 1}, "topk_group 1 with num_experts_per_tok 4.* = 4"),
        ({"num_experts_per_tok": 6}, "topk_group 2 with num_experts_per_tok 6.* = 3"),
        ({"topk_group": 5}, "topk_group 5 exceeds n_group 4"),
        ({"n_group": 3}, "n_routed_experts 8 is not a multiple of n_group 3"),
        ({"n_group": 8}, "n_group 8 gives 1 experts per group"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 exceeds n_routed_experts 8"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor is 0"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        ({"n_shared_experts": 0}, "n_shared_experts is 0"),
    ],
)
def test_sigmoid_routing_unsupported_by_megatron_is_rejected(changes, message, family_configs):
    for family in SIGMOID:
        with pytest.raises(ConversionError, match=message):
            arguments(family_configs[family], **changes)


def test_group_limits_of_single_best_scores_are_rejected(family_configs):
    changes = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
    with pytest.raises(ConversionError, match="its best 1, megatron by its best"):
        arguments(family_configs["deepseek_v2"], **changes)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 4}, "num_key_value_heads 4 is not supported, only 8"),
        ({"kv_lora_rank": None}, "lacks kv_lora_rank"),
        ({"rope_scaling": {"type": "llama3", "factor": 4.0}}, "'llama3' is not supported, only 'default' and 'yarn'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "original_max_position_embeddings None"),
    ],
)
def test_latent_attention_unsupported_by_megatron_is_rejected(family, changes, message, family_configs):
    with pytest.raises(ConversionError, match=message):
        arguments(family_configs[family], **changes)


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mscale": 0.7}, "mscale 0.7 without mscale_all_dim"),
        ({"mscale_all_dim": 0.7}, "mscale_all_dim 0.7 without mscale"),
        ({"attention_factor": 1.1}, "attention_factor"),
        ({"truncate": False}, "truncate"),
        ({"factor": None}, "factor None"),
    ],
)
def test_yarn_unsupported_by_megatron_is_rejected(changes, message, family_configs):
    with pytest.raises(ConversionError, match=message):
        arguments(family_configs["deepseek_v3"], rope_scaling=YARN | changes)


@pytest.mark.parametrize(
    ("given", "expressed"),
    [
        ({}, (1.0, 0.0)),
        ({"mscale": 1.0}, (1.0, 0.0)),
        ({"mscale": 0.7, "mscale_all_dim": 0.8, "truncate": True, "beta_fast": None}, (0.7, 0.8)),
    ],
)
def test_yarn_attention_scale_matches_transformers(given, expressed, family_configs):
    """References: transformers' rope function for the factor on cosines, its attention for the factor on scores."""
    config = family_configs["deepseek_v3"]
    transformer = arguments(config, rope_scaling=YARN | given).transformer
    assert (transformer["mscale"], transformer["mscale_all_dim"]) == expressed
    rope = {"rope_type": "yarn", "rope_theta": 1e4} | {k: v for k, v in (YARN | given).items() if k != "type"}
    theirs = transformers.DeepseekV3Config(**{**config, "rope_parameters": rope})
    _, on_cosines = ROPE_INIT_FUNCTIONS["yarn"](theirs, None)

    def mscale(scale: float) -> float:  # megatron's _yarn_get_mscale
        return 0.1 * scale * math.log(transformer["rotary_scaling_factor"]) + 1

    assert mscale(expressed[0]) / mscale(expressed[1]) == pytest.approx(on_cosines)
    attention = transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3Attention(theirs, 0)
    assert mscale(expressed[1]) ** 2 / math.sqrt(6) == pytest.approx(attention.scaling)


@pytest.mark.parametrize("family", ["deepseek_v2", *SIGMOID])
def test_sparse_pattern_follows_moe_layer_freq(family, family_configs):
    """The rule of DeepSeek's own code; transformers supports only frequency 1."""
    config = family_configs[family] | {"num_nextn_predict_layers": 0, "first_k_dense_replace": 1, "moe_layer_freq": 2}
    assert arguments(config).transformer["moe_layer_freq"] == [0, 0, 1, 0]
    routers = [row.layers for row in family_for(config).rows(config) if row.mcore.endswith("router.weight")]
    assert routers == [(2,)]
    dense = config | {"first_k_dense_replace": 4}
    assert "num_moe_experts" not in arguments(dense).transformer
    assert not any(".router." in row.mcore for row in family_for(dense).rows(dense))


def test_correction_bias_row_is_always_float32(family_configs):
    for family in SIGMOID:
        config = family_configs[family]
        biases = [row for row in family_for(config).rows(config) if row.mcore.endswith("expert_bias")]
        assert {row.dtype for row in biases} == {torch.float32}


def test_glm_partial_rotary_factor_sets_rotated_fraction(family_configs):
    assert arguments(family_configs["glm4_moe"]).rotary.fraction == 0.5
    for given in (0.25, 1.0):
        assert arguments(family_configs["glm4_moe"], partial_rotary_factor=given).rotary.fraction == given
