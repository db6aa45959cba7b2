"""Rules of rollout.quantization, and the defaults that depend on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rl.config import Config
from mcore_rl.config.load import load_text
from mcore_rl.config.quantization import BLOCK, FP8, FP8_RECIPES, QUANTIZATIONS
from mcore_rl.config.roles import EngineRole
from mcore_rl.config.rules.quantization import check_capability, check_quantization
from mcore_rl.config.schema import ModelConfig, RolloutConfig
from mcore_rl.errors import ConfigError
from mcore_rl.resolved.quantization import check_blocks
from model_converters.families import family_for
from tests.tiny_models import tiny_fields

SIZES = {"hidden_size": 200, "head_dim": 128, "intermediate_size": 512, "moe_intermediate_size": 256}
"""Two ranks divide them into whole blocks, except hidden_size, which no rank divides."""


def configured(**keys: str) -> Config:
    config = load_text("run: {dir: x}\nmodel: {hf_path: y}\n", needs_data=False)
    config.rollout.quantization, config.model.dtype, config.cluster.device = FP8, "bfloat16", "cpu"
    for key, value in keys.items():
        section, name = key.split("__")
        setattr(getattr(config, section), name, value)
    return config


@pytest.mark.parametrize("recipe", ["none", *FP8_RECIPES])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_check_every_pair_with_actor_fp8_is_accepted_or_named(recipe: str, quantization: str) -> None:
    config = configured(actor__fp8=recipe, rollout__quantization=quantization)
    accepted = {"none": (recipe,), "fp8": ("none", "blockwise"), "int4": ("none",)}[quantization]
    if recipe in accepted:
        check_quantization(config)
        return
    remedy = " or ".join(accepted)
    with pytest.raises(ConfigError, match=rf"actor\.fp8={recipe} has .*set actor\.fp8 to {remedy}, or"):
        check_quantization(config)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rollout__engine": "sglang"}, r"rollout\.quantization=fp8 needs rollout\.engine=vllm"),
        ({"model__dtype": "float32"}, r"rollout\.quantization=fp8 needs model\.dtype=bfloat16"),
        ({"model__dtype": "auto"}, r"rollout\.quantization=fp8 needs model\.dtype=bfloat16"),
    ],
)
def test_check_unsupported_key_is_named(keys: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_quantization(configured(**keys))


def test_check_dtype_auto_is_bfloat16_on_gpus() -> None:
    check_quantization(configured(model__dtype="auto", cluster__device="auto"))


def test_check_supervised_run_has_no_engine() -> None:
    config = configured(model__dtype="float32")
    config.algorithm.policy_loss.name = "sft"
    check_quantization(config)


def test_check_capability_older_gpu_is_rejected() -> None:
    rollout = RolloutConfig(quantization=FP8)
    check_capability(rollout, (8, 9))
    check_capability(RolloutConfig(), (8, 0))
    with pytest.raises(ConfigError, match=r"needs GPUs of compute capability 8\.9 or newer, but the engine's has 8\.6"):
        check_capability(rollout, (8, 6))


def role(**keys: object) -> EngineRole:
    return EngineRole.rollout(RolloutConfig(quantization=FP8, **keys), ModelConfig(hf_path="y"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("family", "changes", "keys", "message"),
    [
        ("qwen3", {"intermediate_size": 448}, {}, r"448 rows of model\.layers\.0\.mlp\.gate_proj\.weight"),
        ("qwen3", {"head_dim": 96, "num_key_value_heads": 2}, {}, r"192 rows of .*k_proj"),
        ("qwen3", {"head_dim": 64}, {"tp": 2}, r"with rollout\.tp=2 one would hold 64 rows of .*k_proj"),
        ("qwen3_moe", {}, {"tp": 4}, r"64 rows of .*experts\.0\.gate_proj\.weight; set rollout\.expert_parallel=true"),
        ("deepseek_v3", {"head_dim": 8}, {"tp": 2}, r"48 rows of .*q_b_proj"),
    ],
)
def test_check_blocks_matrix_cut_within_a_block_is_named(
    family: str, changes: dict[str, int], keys: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"rollout\.quantization=fp8 needs whole blocks.*{message}"):
        check_blocks(role(**keys), tiny_fields(family, **(SIZES | changes)))


@pytest.mark.parametrize(
    ("family", "changes", "keys"),
    [
        ("qwen3", {}, {"tp": 2}),
        ("qwen3", {"num_attention_heads": 8, "num_key_value_heads": 2}, {"tp": 4}),  # replicated key-value heads
        ("qwen3_moe", {}, {"tp": 2}),
        ("qwen3_moe", {"moe_intermediate_size": 128}, {"tp": 4, "expert_parallel": True}),
    ],
)
def test_check_blocks_whole_blocks_are_accepted(family: str, changes: dict[str, int], keys: dict[str, object]) -> None:
    check_blocks(role(**keys), tiny_fields(family, **(SIZES | changes)))


def test_check_blocks_without_quantization_accepts_every_size() -> None:
    rollout = EngineRole.rollout(RolloutConfig(), ModelConfig(hf_path="y"))
    check_blocks(rollout, tiny_fields("qwen3"))


def test_block_is_that_of_exports() -> None:
    from model_converters.hf.quant import EXPORT_BLOCK

    assert (BLOCK, BLOCK) == EXPORT_BLOCK


def test_every_fp8_recipe_has_requirements() -> None:
    from mcore_rl.resolved.implementation import RECIPES

    assert RECIPES.keys() == FP8_RECIPES.keys()


def test_engine_fields_list_the_matrices_that_stay_unquantised(tmp_path: Path) -> None:
    import json

    from mcore_rl.weights.engine_config import engine_overrides

    fields = tiny_fields("qwen3_moe", num_hidden_layers=2)
    assert family_for(fields).model_type == "qwen3_moe"
    (tmp_path / "config.json").write_text(json.dumps(fields))
    found = engine_overrides(tmp_path, load_weights=False, quantization=FP8)["quantization_config"]
    assert found == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": [
            "model.embed_tokens",
            "model.layers.0.mlp.gate",
            "model.layers.1.mlp.gate",
            "lm_head",
        ],
    }


def test_check_draft_layers_are_rejected() -> None:
    config = configured(rollout__draft="mtp")
    with pytest.raises(
        ConfigError, match=r"quantization=fp8 does not support rollout\.draft=mtp yet; set .*=ngram or none"
    ):
        check_quantization(config)
