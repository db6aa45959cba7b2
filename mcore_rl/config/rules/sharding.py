"""Rules for parameters that are sharded over data-parallel ranks (parallel.shard_parameters, strategy fsdp2)."""

from __future__ import annotations

from operator import attrgetter

from mcore_rl.config.models import FSDP2
from mcore_rl.config.roles import ModelRole
from mcore_rl.errors import ConfigError

REQUIRED: dict[str, tuple[object, str]] = {
    "parallel.pp": (1, "pipeline stages would gather their layers for every micro-batch"),
    "distributed_optimizer": (True, "the optimizer state is sharded like the parameters"),
    "overlap_grad_reduce": (False, "layers always reduce their gradients during the backward pass"),
    "overlap_param_gather": (False, "layers always gather their parameters during a pass"),
    "optimizer.cpu_offload": (False, "the optimizer updates the shards in place"),
    "offload.grads": (False, "gradients of shards have no memory outside of an update"),
    "fp8": ("none", "FP8 weights cannot be gathered"),
}
"""Key of a model -> the value that sharded parameters need, with the reason."""
TRANSFORMERS_REQUIRED: dict[str, tuple[object, str]] = {
    "parallel.tp": (1, "models of transformers are only data-parallel"),
    "parallel.cp": (1, "models of transformers are only data-parallel"),
    "parallel.ep": (1, "models of transformers are only data-parallel"),
    "parallel.etp": (1, "models of transformers are only data-parallel"),
    "moe.dispatcher": ("auto", "tokens stay on their rank, which gathers all experts of a layer"),
    "mtp_loss_coefficient": (0.0, "models of transformers have no multi-token-prediction layers"),
    "recompute_modules": ([], "models of transformers recompute whole layers"),
    "recompute_layers": (1, "models of transformers recompute layer by layer"),
}
"""Key of a model -> the value that strategy fsdp2 needs, in addition to REQUIRED, with the reason."""


def check_sharding(role: ModelRole) -> None:
    """Raise ConfigError for a key of a model that does not support sharded parameters or the strategy."""
    section = role.section
    if section.strategy == FSDP2:
        chosen = f"{role.key('strategy')}={FSDP2}"
        if section.recompute == "selective":
            raise ConfigError(
                f"{role.key('recompute')}=selective is not supported with {chosen}: models of transformers recompute "
                "whole layers; set it to full or none"
            )
        _require(role, REQUIRED | TRANSFORMERS_REQUIRED, chosen)
    elif section.parallel.shard_parameters:
        _require(role, REQUIRED, f"{role.key('parallel.shard_parameters')}=true")


def _require(role: ModelRole, required: dict[str, tuple[object, str]], chosen: str) -> None:
    for name, (needed, reason) in required.items():
        value = attrgetter(name)(role.section)
        # parallel.etp is None by default.
        if value not in (needed, None):
            wanted = str(needed).lower() if isinstance(needed, bool) else needed
            raise ConfigError(f"{role.key(name)}={value} is not supported with {chosen}: {reason}; set it to {wanted}")
