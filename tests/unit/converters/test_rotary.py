"""Frequencies and factors of every rope type, compared bit for bit with transformers' own functions."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from model_converters.errors import ConversionError
from model_converters.families import FAMILIES
from model_converters.families.parts.rotary import ROPE_TYPES, RotarySettings, inverse_frequencies
from tests.tiny_models import LLAMA3, LONGROPE, YARN, tiny_fields

Rope = dict[str, Any]
YARNS: list[Rope] = [
    {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **ramp, **magnitude}
    for factor, original, ramp, magnitude in product(
        (1, 4, 40.0),
        (16, 4096),
        ({}, {"truncate": False}, {"truncate": None, "beta_fast": 4, "beta_slow": 0}, {"beta_fast": 1.0}),
        ({}, {"mscale": 1.0, "mscale_all_dim": 0.7}, {"mscale": 0.7}, {"attention_factor": 1.7}),
    )
]
LLAMA3S: list[Rope] = [
    LLAMA3 | {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": original}
    for low, high, original in product((1, 2.5), (4, 8.0), (64, 8192))
]
LONGROPES: list[Rope] = [
    LONGROPE | {"original_max_position_embeddings": original, **fields}
    for original, fields in product((64, 300), ({}, {"factor": None}, {"attention_factor": 1.3}))
]
SIMPLE: list[Rope] = [{"rope_type": kind, "factor": factor} for kind in ("linear", "dynamic") for factor in (1, 2.5)]
GRID = {"linear and dynamic": SIMPLE, "yarn": YARNS, "llama3": LLAMA3S, "longrope": LONGROPES}


def rotation_of(kind: str, rope: Rope, **fields: Any) -> RotarySettings:
    return FAMILIES[kind].model_arguments(tiny_fields(kind, rope_parameters=rope, **fields)).rotary


@pytest.mark.parametrize("name", GRID)
def test_rotary_every_field_equals_transformers_bit_for_bit(name: str) -> None:
    """glm4_moe rotates 16 of 32 elements."""
    models = (("llama", 16, 1e4), ("glm4_moe", 32, 1e6))
    for rope, (kind, head_dim, theta) in product(GRID[name], models):
        fields = tiny_fields(kind, head_dim=head_dim, rope_parameters=rope | {"rope_theta": theta})
        rotary = FAMILIES[kind].model_arguments(fields).rotary
        config = AutoConfig.for_model(**copy.deepcopy(fields))  # transformers modifies its arguments
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
        assert torch.equal(inverse_frequencies(rotary, head_dim), frequencies), rope
        assert rotary.factor == factor, rope


def test_rotary_both_formats_of_transformers_agree() -> None:
    new = rotation_of("llama", LONGROPE)
    old = {("type" if key == "rope_type" else key): value for key, value in LONGROPE.items()}
    theta, original = old.pop("rope_theta"), old.pop("original_max_position_embeddings")
    fields = {"rope_theta": theta, "rope_scaling": old, "original_max_position_embeddings": original}
    assert rotation_of("llama", {}, **fields) == new


@pytest.mark.parametrize(
    ("rope", "limit"), [({"rope_type": "dynamic", "factor": 2.0}, 256), (LONGROPE, 64), (YARN, None)]
)
def test_rotary_max_tokens_is_the_length_at_which_transformers_changes(rope: Rope, limit: int | None) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = rotation_of("llama", {"rope_theta": 1e4} | rope)
    assert rotary.max_tokens == limit
    fields = tiny_fields("llama", rope_parameters={"rope_theta": 1e4} | rope)
    module = LlamaRotaryEmbedding(AutoConfig.for_model(**copy.deepcopy(fields)))
    equal = []
    for length in (limit or 256, (limit or 256) + 1):
        module(torch.zeros(1), torch.arange(length)[None])
        equal.append(torch.allclose(module.inv_freq, inverse_frequencies(rotary, 16), rtol=1e-6))
    assert equal == [True, limit is None]


def test_rotary_in_meta_device_context_has_values() -> None:
    """The planner builds models on the meta device."""
    for rope in (YARN, LONGROPE, LLAMA3):
        with torch.device("meta"):
            assert inverse_frequencies(rotation_of("llama", rope), 16).device.type == "cpu"


def test_rope_type_list_is_shared_by_families_with_grouped_attention() -> None:
    assert set(ROPE_TYPES) == {"default", "linear", "dynamic", "yarn", "llama3", "longrope"}
    for kind, family in FAMILIES.items():
        fields = tiny_fields(family.transformers_type or kind)
        # The sections must fit the number of rotated pairs.
        kept = ("mrope_section", "mrope_interleaved", "partial_rotary_factor") if "vision_config" in fields else ()
        own = fields["rope_parameters"]
        sections = {key: value for key, value in own.items() if key in kept}
        linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, **sections}
        # Gemma 3 has one object for layers that attend to all tokens, and one for the others.
        fields["rope_parameters"] = own | {"full_attention": linear} if "full_attention" in own else linear
        if "kv_lora_rank" in fields:
            with pytest.raises(ConversionError, match="rope type 'linear' is not supported, only 'default' and 'yarn'"):
                family.model_arguments(fields)
        else:
            family.model_arguments(fields)
