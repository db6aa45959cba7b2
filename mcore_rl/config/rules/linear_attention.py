"""Rules for models with linear attention (gated delta nets)."""

from __future__ import annotations

from typing import Any

from mcore_rl.config.quantization import UNQUANTIZED
from mcore_rl.config.roles import EngineRole
from mcore_rl.config.sampling import NO_DRAFTS
from mcore_rl.config.schema import resolved_dtype
from mcore_rl.errors import ConfigError

_NETS = "linear attention (linear_num_key_heads)"


def check_linear_attention(role: EngineRole, hf: dict[str, Any], *, cuda: bool) -> None:
    """Reject settings with which an engine cannot run gated delta nets, or cannot receive their weights.

    Raises: ConfigError.
    """
    if not hf.get("linear_num_key_heads"):
        return
    rollout = role.section
    needed = (
        ("engine", rollout.engine, "vllm", f"weights of {_NETS} can be sent to vLLM only"),
        ("quantization", rollout.quantization, UNQUANTIZED, f"it is not supported for {_NETS}"),
        ("draft", rollout.draft, NO_DRAFTS, f"drafts are not supported for {_NETS}"),
    )
    for key, value, wanted, reason in needed:
        if value != wanted:
            raise ConfigError(f"{role.key(key)}={value}: {reason}; set it to {wanted}")
    if not cuda and resolved_dtype(role.model.dtype, cuda=False) != "bfloat16":
        raise ConfigError(
            f"{role.dtype_source}={role.model.dtype}: vLLM's CPU kernels of {_NETS} need bfloat16; set "
            f"{role.dtype_key}=bfloat16"
        )
