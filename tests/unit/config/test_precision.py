"""Rules of model.float32_head and model.float32_router, and of model.dtype=float16."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mcore_rl.config import Config
from mcore_rl.config.fields import check_domains
from mcore_rl.config.load import load_config, load_text
from mcore_rl.config.models import ActorConfig, ModelConfig, TeacherConfig, TeacherSourceConfig
from mcore_rl.config.models.teacher import TeacherMoeConfig
from mcore_rl.config.reward import JudgeConfig
from mcore_rl.config.roles import EngineRole, ModelRole
from mcore_rl.config.rules.precision import check_float16, check_float16_engine, check_float32_router, check_precision
from mcore_rl.config.rules.validation import check_engine_sizes, validate_critic, validate_keys
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.errors import ConfigError


def configured(dtype: str, device: str, **keys: bool) -> Config:
    config = load_text("run: {dir: x}\nmodel: {hf_path: y}\n", needs_data=False)
    config.cluster.device = device
    config.model = ModelConfig("y", dtype=dtype, **keys)
    return config


@pytest.mark.parametrize("key", ["float32_head", "float32_router"])
@pytest.mark.parametrize(("dtype", "device"), [("float32", "cuda"), ("auto", "cpu")])
def test_check_part_in_float32_of_float32_model_is_rejected(key: str, dtype: str, device: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.{key}=true has no effect with model\.dtype={dtype}"):
        check_precision(configured(dtype, device, **{key: True}))
    check_precision(configured(dtype, device))


@pytest.mark.parametrize(("dtype", "device"), [("bfloat16", "cpu"), ("auto", "cuda"), ("auto", "auto")])
def test_check_parts_in_float32_of_bfloat16_model_are_accepted(dtype: str, device: str) -> None:
    check_precision(configured(dtype, device, float32_head=True, float32_router=True))


@pytest.mark.parametrize(
    "chosen", ["trainer.objective=sft", "trainer.objective=reward_model", "algorithm.policy_loss.name=sft"]
)
def test_check_float32_router_without_engines_is_rejected(base: str, chosen: str) -> None:
    config = load_config(base, [chosen, "model.dtype=bfloat16", "model.float32_router=true"])
    with pytest.raises(
        ConfigError, match=rf"^model\.float32_router=true has no effect with {chosen}, which has no eng"
    ):
        check_precision(config)
    config.model.float32_router, config.model.float32_head = False, True
    check_precision(config)


@pytest.mark.parametrize(
    ("engine", "fields", "message"),
    [
        ("vllm", {"model_type": "qwen3"}, "model.float32_router=true has no effect: the model has no experts"),
        ("sglang", {"model_type": "gpt_oss", "num_local_experts": 8}, "rollout.engine=sglang computes the router"),
        ("vllm", {"model_type": "gpt_oss", "num_local_experts": 8}, None),
        ("vllm", {"model_type": "ernie4_5_moe", "moe_num_experts": 8}, None),
        ("sglang", {"model_type": "qwen3_moe", "num_experts": 8}, None),
    ],
)
def test_check_router_that_cannot_be_float32_is_rejected(
    engine: str, fields: dict[str, Any], message: str | None
) -> None:
    role = EngineRole.rollout(RolloutConfig(engine=engine), ModelConfig("y", float32_router=True))
    if message is None:
        check_float32_router(role, fields)
        return
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_float32_router(role, fields)
    unset = EngineRole.rollout(RolloutConfig(engine=engine), ModelConfig("y"))
    check_float32_router(unset, fields)


def test_judge_computes_in_its_own_dtype() -> None:
    """No trainer computes a judge's log-probabilities, and it may have no experts."""
    model = ModelConfig("y", float32_head=True, float32_router=True)
    role = EngineRole.judge(JudgeConfig(hf_path="judge"), RolloutConfig(), model)
    assert not role.model.float32_head
    check_float32_router(role, {"model_type": "qwen3"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["actor.fp8=blockwise"], r"actor\.fp8=blockwise is not supported with model\.dtype=float16; set it to none"),
        (["actor.moe.dispatcher=deepep"], r"actor\.moe\.dispatcher=deepep exchanges tokens in bfloat16 only"),
        (["actor.optimizer.loss_scale.initial=1000"], r"loss_scale\.initial=1000 must be a power of two"),
        (["actor.optimizer.loss_scale.minimum=3"], r"loss_scale\.minimum=3 must be a power of two"),
        (
            [f"actor.optimizer.loss_scale.initial={2.0**127}"],
            r"loss_scale\.initial=1\.7\S+ must be at most 8\.5\S+e\+37",
        ),
        (
            [f"actor.optimizer.loss_scale.minimum={2.0**127}"],
            r"loss_scale\.minimum=1\.7\S+ must be at most 8\.5\S+e\+37",
        ),
        (
            [f"actor.optimizer.loss_scale.initial={2.0**-127}"],
            r"loss_scale\.initial=5\.8\S+ must be at least 1\.1\S+e-38",
        ),
        (
            [f"actor.optimizer.loss_scale.minimum={2.0**-127}"],
            r"loss_scale\.minimum=5\.8\S+ must be at least 1\.1\S+e-38",
        ),
        (
            ["actor.optimizer.loss_scale.initial=16", "actor.optimizer.loss_scale.minimum=32"],
            r"loss_scale\.minimum=32 must be at most actor\.optimizer\.loss_scale\.initial=16",
        ),
        (["rollout.quantization=fp8"], r"rollout\.quantization=fp8 needs model\.dtype=bfloat16"),
        (["rollout.quantization=int4"], r"rollout\.quantization=int4 needs model\.dtype=bfloat16"),
    ],
)
def test_validate_float16_with_an_unsupported_key_is_rejected(base: str, changes: list[str], message: str) -> None:
    config = load_config(base, ["model.dtype=float16", *changes])
    with pytest.raises(ConfigError, match=message):
        validate_keys(config, run_here=False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "auto"])
def test_validate_loss_scale_without_float16_has_no_effect(base: str, dtype: str) -> None:
    config = load_config(base, [f"model.dtype={dtype}", "actor.optimizer.loss_scale.window=5"])
    with pytest.raises(ConfigError, match=r"loss_scale\.window=5 has no effect; set model\.dtype=float16"):
        validate_keys(config, run_here=False)


def test_validate_critic_in_float16_names_its_own_keys(base: str) -> None:
    config = load_config(base, ["model.dtype=float16", "critic.optimizer.loss_scale.initial=3"])
    with pytest.raises(ConfigError, match=r"^critic\.optimizer\.loss_scale\.initial=3 must be a power of two"):
        validate_critic(config)


def test_check_float16_of_a_teacher_names_its_own_key() -> None:
    section = TeacherConfig(dtype="float16", moe=TeacherMoeConfig(dispatcher="deepep"), num_ranks=1)
    role = ModelRole.teacher_ranks(
        section, TeacherSourceConfig("all", "z"), ActorConfig(), ModelConfig("y", dtype="bfloat16")
    )
    with pytest.raises(
        ConfigError, match=r"^teacher\.moe\.dispatcher=deepep .* and teacher\.dtype=float16; .*, or teacher\.dtype to"
    ):
        check_float16(role, cuda=True)


def test_check_float16_with_the_extreme_powers_of_two_is_accepted(base: str) -> None:
    scale = "actor.optimizer.loss_scale"
    config = load_config(base, ["model.dtype=float16", f"{scale}.minimum={2.0**-126}", f"{scale}.initial={2.0**126}"])
    check_domains(config)
    check_float16(ModelRole.policy(config.actor, config.model), cuda=False)


@pytest.mark.parametrize("prefix", ["rollout", "judge"])
def test_check_float16_engine_rejects_models_that_overflow(prefix: str) -> None:
    model = ModelConfig("y", dtype="float16")
    role = EngineRole(prefix, section=RolloutConfig(), model=model)
    key = "model.dtype" if prefix == "rollout" else "judge.dtype"
    sizes = {"model_type": "gemma3_text", "num_attention_heads": 4}
    with pytest.raises(ConfigError, match=f"^{re.escape(key)}=float16: activations of gemma3_text exceed"):
        check_engine_sizes(role, sizes, cuda=False)
    model.dtype = "bfloat16"
    check_engine_sizes(role, sizes, cuda=False)


def test_check_float16_engine_rejects_data_parallel_attention_on_gpus() -> None:
    section = RolloutConfig(engine="sglang", tp=2, data_parallel_attention=True)
    role = EngineRole.rollout(section, ModelConfig("y", dtype="float16"))
    with pytest.raises(
        ConfigError, match=r"^rollout\.data_parallel_attention=true: DeepEP exchanges tokens in bfloat16"
    ):
        check_float16_engine(role, {"model_type": "qwen3_moe"}, cuda=True)
    check_float16_engine(role, {"model_type": "qwen3_moe"}, cuda=False)
