"""Rules of the data type: parts that compute in float32 while the weights have a shorter type, and float16."""

from __future__ import annotations

import math
from typing import Any

from mcore_rl.config.algorithm import is_supervised
from mcore_rl.config.fields import reject_unless_default
from mcore_rl.config.quantization import UNQUANTIZED
from mcore_rl.config.roles import EngineRole, ModelRole
from mcore_rl.config.rules.engine_support import EXPERT_COUNTS
from mcore_rl.config.rules.objective import chosen_objective
from mcore_rl.config.schema import Config, resolved_dtype
from mcore_rl.errors import ConfigError

FLOAT16 = "float16"
NOT_FLOAT16 = ("gemma3_text", "gemma3")
"""Families that vLLM 0.32 refuses in float16 (_FLOAT16_NOT_SUPPORTED_MODELS)."""


def overflow_advice(key: str) -> str:
    """Return the end of errors about values that are not finite in a float16 model. key: of its data type."""
    return f"{key}={FLOAT16} holds no numbers above 65,504: set {key}=bfloat16"


def check_precision(config: Config) -> None:
    """Raise ConfigError for a part in float32 where everything is float32 already, or in a run without engines."""
    model = config.model
    if model.float32_router and is_supervised(config.algorithm):
        raise ConfigError(
            f"model.float32_router=true has no effect with {chosen_objective(config)}, which has no engines, and the "
            "trainer's routers are float32 already; set it to false"
        )
    if resolved_dtype(model.dtype, cuda=config.cluster.device != "cpu") != "float32":
        return
    for key in ("float32_head", "float32_router"):
        if getattr(model, key):
            raise ConfigError(
                f"model.{key}=true has no effect with model.dtype={model.dtype}, which computes everything in float32 "
                "here; set it to false, or model.dtype to bfloat16"
            )


def check_float32_router(role: EngineRole, hf: dict[str, Any]) -> None:
    """Raise ConfigError for model.float32_router if the model has no routers, or routers that cannot be replaced."""
    if not role.model.float32_router:
        return
    if not any(hf.get(count) for count in (*EXPERT_COUNTS, "moe_num_experts")):
        raise ConfigError("model.float32_router=true has no effect: the model has no experts; set it to false")
    if role.section.engine == "sglang" and hf.get("model_type") == "gpt_oss":
        # SGLang 0.5.23 fuses the product of this router with the choice of experts.
        raise ConfigError(
            f"model.float32_router=true: {role.key('engine')}=sglang computes the router of gpt_oss in its own kernel; "
            f"set it to false, or {role.key('engine')} to vllm"
        )


def check_float16(role: ModelRole, *, cuda: bool) -> None:
    """Raise ConfigError for a trained or frozen model on ranks in float16 with a key that does not support it, and
    for keys of the loss scale that have no effect or no meaning."""
    section, key = role.section, role.key("optimizer.loss_scale")
    scale = section.optimizer.loss_scale
    if resolved_dtype(role.model.dtype, cuda=cuda) != FLOAT16:
        reject_unless_default(key, scale, f"set {role.dtype_key}={FLOAT16}, the only data type whose loss is scaled")
        return
    for name in ("initial", "minimum"):
        value = getattr(scale, name)
        if math.frexp(value)[0] != 0.5:
            raise ConfigError(
                f"{key}.{name}={value:g} must be a power of two, such as 65536: other scales round every gradient"
            )
    if scale.minimum > scale.initial:
        raise ConfigError(
            f"{key}.minimum={scale.minimum:g} must be at most {key}.initial={scale.initial:g}; lower it, or raise the "
            "other"
        )
    if section.fp8 != UNQUANTIZED:
        raise ConfigError(
            f"{role.key('fp8')}={section.fp8} is not supported with {role.dtype_key}={FLOAT16}; set it to "
            f"{UNQUANTIZED}, or {role.dtype_key} to bfloat16"
        )
    if section.moe.dispatcher == "deepep":
        raise ConfigError(
            f"{role.key('moe.dispatcher')}=deepep exchanges tokens in bfloat16 only, and "
            f"{role.dtype_key}={FLOAT16}; set it to alltoall, or {role.dtype_key} to bfloat16"
        )


def check_float16_engine(role: EngineRole, hf: dict[str, Any], *, cuda: bool) -> None:
    """Raise ConfigError for a float16 model that an engine does not start, or whose tokens it cannot exchange."""
    if resolved_dtype(role.model.dtype, cuda=cuda) != FLOAT16:
        return
    family, key = hf.get("model_type"), role.dtype_key
    if family in NOT_FLOAT16:
        raise ConfigError(
            f"{key}={FLOAT16}: activations of {family} exceed the range of {FLOAT16}, and vLLM does not start it; set "
            f"{key}=bfloat16"
        )
    if role.section.data_parallel_attention and cuda:
        raise ConfigError(
            f"{role.key('data_parallel_attention')}=true: DeepEP exchanges tokens in bfloat16 only, and "
            f"{key}={FLOAT16}; set it to false, or {key} to bfloat16"
        )
