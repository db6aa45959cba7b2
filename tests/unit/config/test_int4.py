"""Rules of rollout.quantization=int4 and actor.quantization_aware."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mcore_rl.config import Config
from mcore_rl.config.load import load_text
from mcore_rl.config.models import ActorConfig, ParallelConfig
from mcore_rl.config.quantization import GROUPS, INT4
from mcore_rl.config.roles import EngineRole, ModelRole
from mcore_rl.config.rules.quantization import check_capability, check_quantization
from mcore_rl.config.rules.validation import validate_critic, validate_reward_model
from mcore_rl.config.schema import ModelConfig, RolloutConfig
from mcore_rl.errors import ConfigError
from mcore_rl.resolved.quantization import check_blocks, check_trained_groups
from mcore_rl.weights.engine_config import engine_overrides
from model_converters.families import family_for
from tests.tiny_models import tiny_fields

MODEL = ModelConfig(hf_path="y")
SIZES = {"hidden_size": 128, "moe_intermediate_size": 192, "num_hidden_layers": 2}


def configured(*, group: int = 128, trained: int = 0) -> Config:
    config = load_text("run: {dir: x}\nmodel: {hf_path: y}\n", needs_data=False)
    config.rollout.quantization, config.rollout.quantization_group = INT4, group
    config.model.dtype, config.cluster.device = "bfloat16", "cpu"
    config.actor.quantization_aware = trained
    return config


@pytest.mark.parametrize("group", GROUPS)
def test_check_equal_groups_of_trainer_and_engine_are_accepted(group: int) -> None:
    check_quantization(configured(group=group))
    check_quantization(configured(group=group, trained=group))


@pytest.mark.parametrize(
    ("group", "trained", "message"),
    [
        (64, 0, r"rollout\.quantization_group=64 has no kernels in vLLM; set it to 32 or 128"),
        (128, 32, r"actor\.quantization_aware=32 differs from rollout\.quantization_group=128"),
    ],
)
def test_check_unequal_or_unknown_group_is_named(group: int, trained: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_quantization(configured(group=group, trained=trained))


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_check_group_without_int4_has_no_effect(quantization: str) -> None:
    config = configured(group=32)
    config.rollout.quantization = quantization
    with pytest.raises(ConfigError, match=r"quantization_group=32 has no effect; set rollout\.quantization=int4, or"):
        check_quantization(config)


@pytest.mark.parametrize("section", ["rollout", "algorithm"])
def test_check_training_without_int4_engines_is_rejected(section: str) -> None:
    config = configured(trained=128)
    if section == "rollout":
        config.rollout.quantization = "fp8"
    else:
        config.algorithm.policy_loss.name = "sft"
    with pytest.raises(ConfigError, match=r"this run has none; set actor\.quantization_aware=0"):
        check_quantization(config)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"engine": "sglang"}, r"rollout\.quantization=int4 needs rollout\.engine=vllm"),
        ({"draft": "mtp"}, r"rollout\.quantization=int4 does not support rollout\.draft=mtp"),
    ],
)
def test_check_unsupported_key_is_named(keys: dict[str, str], message: str) -> None:
    config = configured()
    vars(config.rollout).update(keys)
    with pytest.raises(ConfigError, match=message):
        check_quantization(config)


def test_check_value_models_are_not_rounded() -> None:
    config = configured()
    config.critic.quantization_aware = config.reward_model.quantization_aware = 128
    for validate, key in ((validate_critic, "critic"), (validate_reward_model, "reward_model")):
        with pytest.raises(ConfigError, match=rf"{key}\.quantization_aware=128 has no effect"):
            validate(config)


def test_check_capability_is_that_of_int4_kernels() -> None:
    check_capability(RolloutConfig(quantization=INT4), (8, 0))
    with pytest.raises(ConfigError, match=r"int4 needs GPUs of compute capability 8\.0 or newer"):
        check_capability(RolloutConfig(quantization=INT4), (7, 5))


def rollout(**keys: object) -> EngineRole:
    return EngineRole.rollout(RolloutConfig(quantization=INT4, **keys), MODEL)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("qwen3", {}, r"quantises experts only, but the model of model\.hf_path has none; set it to fp8 or none"),
        (
            "qwen3_moe",
            {},
            r"hold 192 columns of .*experts\.0\.down_proj\.weight; set rollout\.quantization_group=32, or",
        ),
        (
            *("qwen3_moe", {"tp": 4, "quantization_group": 32}),
            r"with rollout\.tp=4 one would hold 48 columns of .*; set rollout\.expert_parallel=true or rollout",
        ),
    ],
)
def test_check_engine_that_divides_a_group_is_named(family: str, keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_blocks(rollout(**keys), tiny_fields(family, **SIZES))


@pytest.mark.parametrize("keys", [{"tp": 2}, {"tp": 4, "expert_parallel": True}])
def test_check_engine_with_whole_groups_is_accepted(keys: dict[str, object]) -> None:
    check_blocks(rollout(quantization_group=32, **keys), tiny_fields("qwen3_moe", **SIZES))


def test_check_trainer_that_divides_a_group_is_named() -> None:
    trainer = ModelRole.policy(ActorConfig(parallel=ParallelConfig(tp=4)), MODEL)
    fields = tiny_fields("qwen3_moe", **SIZES)
    check_trained_groups(rollout(quantization_group=32), trainer, fields, 2)
    with pytest.raises(ConfigError, match=r"actor\.parallel\.etp=4 gives a trainer rank 48 columns of .*down_proj"):
        check_trained_groups(rollout(quantization_group=32), trainer, fields, 4)


def test_engine_fields_target_the_experts_only(tmp_path: Path) -> None:
    fields = tiny_fields("deepseek_v3", num_hidden_layers=2)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    found = engine_overrides(tmp_path, load_weights=False, quantization=INT4, group=32)["quantization_config"]
    assert isinstance(found, dict)
    assert (found["quant_method"], found["format"]) == ("compressed-tensors", "pack-quantized")
    scheme = found["config_groups"]["experts"]
    assert (scheme["weights"]["num_bits"], scheme["weights"]["group_size"]) == (4, 32)
    targets = [target.removeprefix("re:") for target in scheme["targets"]]
    for row in family_for(fields).rows(fields):
        for name in row.hf:
            module = name.format(l=1, e=3).removesuffix(".weight")
            assert any(re.match(target, module) for target in targets) == (row.num_experts > 0), module
