"""Overrides of config.json for inference engines, and configurations that no override can fix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from model_converters.errors import ConversionError
from model_converters.families import FAMILIES, check_for_engine, engine_overrides, missing_engine_fields
from model_converters.families.parts.engine_fields import NEUTRAL, SUBMODELS
from model_converters.families.parts.engine_rotation import ROTATION_INSIDE
from tests.engine_fields import OTHER_VALUES
from tests.tiny_models import LONGROPE, OSS, YARN, tiny_fields
from tests.vision_models import SGLANG_TOWERS

HUB = Path(__file__).parents[3].parent / "shared" / "data" / "hf_configs"


def fields_of(name: str, **changes: object) -> dict[str, object]:
    family = FAMILIES[name]
    fields = tiny_fields(family.transformers_type or name) | {"model_type": name}
    if name == "gpt_oss":
        fields |= OSS
    if name in SGLANG_TOWERS:
        fields["vision_config"] = {**fields["vision_config"], **SGLANG_TOWERS[name]}
    if "head_dim" in family.unread_by_engines:
        fields["head_dim"] = fields["hidden_size"] // fields["num_attention_heads"]
    return fields | changes


def added(name: str, fields: dict[str, object]) -> dict[str, object]:
    """Return the overrides that the family's plain configuration does not have."""
    plain = engine_overrides(fields_of(name))
    return {key: value for key, value in engine_overrides(fields).items() if plain.get(key, ...) != value}


@pytest.mark.parametrize("name", FAMILIES)
def test_field_that_only_engines_read_gets_its_neutral_value(name: str) -> None:
    assert NEUTRAL.keys() == OTHER_VALUES.keys()
    family, sizes = FAMILIES[name], {"n_head_kv", "num_kv_heads", "original_num_attention_heads"}
    for key, value in OTHER_VALUES.items():
        expected = {} if key in family.own_fields | family.absent_for_engines else {key: NEUTRAL[key]}
        fields = fields_of(name, **{key: value})
        if key == "rope_is_neox_style":
            expected = {} if name == "ernie4_5_moe" else {key: True}
        if key in sizes and expected:
            expected = {key: fields["num_attention_heads" if key.startswith("original") else "num_key_value_heads"]}
        try:
            assert added(name, fields) == expected
        except ConversionError:
            assert key in family.own_fields | family.absent_for_engines
        if expected:
            assert added(name, fields_of(name, **expected)) == {}


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("glm4_moe", {"partial_rotary_factor": None}, {"partial_rotary_factor": 1.0}),
        (
            "deepseek_v3",
            {"rope_parameters": YARN | {"mscale": 0, "mscale_all_dim": None}},
            {"mscale": 1.0, "mscale_all_dim": 0.0},
        ),
        (
            "kimi_k2",
            {"rope_parameters": YARN | {"beta_fast": None, "beta_slow": 0}},
            {"beta_fast": 32.0, "beta_slow": 1.0},
        ),
        ("deepseek_v2", {"rope_parameters": YARN | {"mscale": 0, "mscale_all_dim": 0}}, {"mscale": 1.0}),
        ("deepseek_v2", {"rope_parameters": YARN | {"attention_factor": None}}, {"attention_factor": ...}),
        ("llama", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0}}, {"mscale": 1.0}),
        ("qwen3", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0}}, {"mscale_all_dim": 0.0}),
        (
            "qwen3",
            {"rope_parameters": YARN | {"mscale": 0, "mscale_all_dim": 0, "factor": 1, "attention_factor": 1.7}},
            {"attn_factor": 1.7},
        ),
        ("qwen2", {"rope_parameters": {"type": "linear", "factor": 4}}, {"factor": 4.0}),
        (
            "mixtral",
            {"rope_parameters": {"type": "dynamic", "factor": 4.0}},
            {"rope_type": "default", "type": "default"},
        ),
        (
            "llama",
            {"rope_parameters": LONGROPE | {"attention_factor": 1.3}},
            {"short_mscale": 1.3, "long_mscale": 1.3},
        ),
    ],
)
def test_rotation_that_engines_read_differently_is_overridden(
    name: str, changes: dict[str, object], expected: dict[str, object]
) -> None:
    found = added(name, fields_of(name, **changes))
    assert found.keys() == {"rope_parameters"}
    for key, value in expected.items():
        assert found["rope_parameters"].get(key, ...) == value
    assert found["rope_parameters"]["rope_theta"] == 10000.0


def test_engine_overrides_greedy_routing_has_one_group() -> None:
    groups = {"n_group": 4, "topk_group": 2}
    greedy = engine_overrides(fields_of("deepseek_v2", topk_method="greedy", **groups))
    assert (greedy["n_group"], greedy["topk_group"]) == (1, 1)
    limited = engine_overrides(fields_of("deepseek_v2", topk_method="group_limited_greedy", **groups))
    assert not groups.keys() & limited.keys()


def test_engine_overrides_other_architecture_is_replaced() -> None:
    for name, family in FAMILIES.items():
        architectures = [family.architecture]
        assert added(name, fields_of(name, architectures=["MistralForCausalLM"])) == {"architectures": architectures}
        assert added(name, fields_of(name, architectures=architectures)) == {}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("name", FAMILIES)
def test_check_for_engine_unfixable_field_is_rejected(name: str, engine: str) -> None:
    if engine in FAMILIES[name].refused_by_engines:
        with pytest.raises(ConversionError, match=f"model_type {name} is not supported by {engine}: "):
            check_for_engine(fields_of(name), engine)
        return
    check_for_engine(fields_of(name), engine)
    rotation = fields_of(name)["rope_parameters"]
    rejected: dict[str, dict[str, object]] = {
        key: {key: {"num_hidden_layers": 2}} for key in SUBMODELS if key not in FAMILIES[name].own_fields
    }
    inside = [key for key in ROTATION_INSIDE if key not in FAMILIES[name].own_fields]
    rejected |= {key: {"rope_parameters": {**rotation, key: 8}} for key in inside}
    rejected |= {key: {key: None} for key in FAMILIES[name].absent_for_engines}
    values = {"head_dim": 24, "tie_word_embeddings": True, "moe_layer_freq": 2}
    unread = FAMILIES[name].unread_by_engines
    rejected |= {key: {key: value} for key, value in values.items() if engine in unread.get(key, ())}
    for key, changes in rejected.items():
        with pytest.raises(ConversionError, match=rf"\b{key} .* not supported"):
            check_for_engine(fields_of(name) | changes, engine)


def test_check_for_engine_contradicting_rope_types_are_rejected() -> None:
    rope = {"rope_type": "default", "type": "linear", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(ConversionError, match=r"\.rope_type 'default' and rope_parameters\.type 'linear'"):
        check_for_engine(fields_of("llama", rope_parameters=rope), "vllm")


def test_check_for_engine_scaling_that_sglang_does_not_read_is_rejected() -> None:
    fields = fields_of("mixtral", rope_parameters={"rope_type": "linear", "factor": 2.0})
    check_for_engine(fields, "vllm")
    with pytest.raises(ConversionError, match="rope type 'linear' is not supported by sglang, which computes mixtral"):
        check_for_engine(fields, "sglang")
    check_for_engine(fields_of("mixtral", rope_parameters={"rope_type": "dynamic", "factor": 2.0}), "sglang")


@pytest.mark.parametrize(
    ("name", "tower", "message"),
    [
        ("qwen2_5_vl", {"patch_size": 16}, "patches of 1536 numbers .* but SGLang 0.5.23 reads patches of 1176 only"),
        ("qwen3_vl", {"deepstack_visual_indexes": [2, 0]}, r"deepstack_visual_indexes \[2, 0\] do not ascend"),
    ],
)
def test_check_for_engine_tower_of_other_sizes_is_rejected(name: str, tower: dict[str, object], message: str) -> None:
    fields = fields_of(name)
    fields["vision_config"] = {**SGLANG_TOWERS.get(name, {}), **dict(fields["vision_config"]), **tower}  # type: ignore[call-overload]
    check_for_engine(fields, "vllm")
    with pytest.raises(ConversionError, match=f"{message}.*set rollout.engine to vllm"):
        check_for_engine(fields, "sglang")


@pytest.mark.skipif(not HUB.is_dir(), reason="needs the hub's own config.json files")
def test_published_config_needs_no_neutral_values() -> None:
    configs = [json.loads(path.read_text()) for path in HUB.glob("*_config.json")]
    run_by_engines = {name for name, family in FAMILIES.items() if not family.refused_by_engines}
    supported = [config for config in configs if config["model_type"] in run_by_engines]
    assert len(supported) > 10
    for config in supported:
        for engine in {"vllm", "sglang"} - FAMILIES[config["model_type"]].refused_by_engines.keys():
            check_for_engine(config, engine)
        assert engine_overrides(config) == missing_engine_fields(config)
