"""Rules for parts of the model that compute in float32 while its weights have a shorter data type."""

from __future__ import annotations

from typing import Any

from mcore_rl.config.algorithm import is_supervised
from mcore_rl.config.roles import EngineRole
from mcore_rl.config.rules.engine_support import EXPERT_COUNTS
from mcore_rl.config.rules.objective import chosen_objective
from mcore_rl.config.schema import Config, resolved_dtype
from mcore_rl.errors import ConfigError


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
