"""A model in the process group of a test's ranks, and functions of ranks without fixes of the CPU backend."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from mcore_rl.config.models import ActorConfig, ParallelConfig
from mcore_rl.config.roles import ModelRole
from mcore_rl.config.schema import ModelConfig


def build(
    hf_config: dict[str, Any], sizes: dict[str, int], *, actor: Any = None, installed: Any = None, **settings: Any
) -> tuple[list[Any], Any]:
    """Build this rank's chunks in a layout of all ranks. `settings` are fields of ModelConfig; without random_init the
    weights are undefined. Returns the chunks and the layout."""
    from mcore_rl.megatron.model import model, parallel
    from mcore_rl.resolved.layout import role_layout
    from mcore_rl.resolved.model import ResolvedModel

    section = replace(actor or ActorConfig(), parallel=ParallelConfig(**sizes))
    role = ModelRole.policy(section, ModelConfig(hf_path="", **settings))
    layout = role_layout(role, dist.get_world_size(), hf_config)
    parallel.initialize_groups(layout, timeout_seconds=60, seed=3)
    return model.build_model(ResolvedModel(role, hf_config, layout), installed=installed), layout


def run_without(rank: int, fixes: list[str], function: Callable[..., Any], *args: Any) -> Any:
    """Return function(rank, *args) of a rank without some fixes of the CPU backend."""
    from mcore_rl.megatron.cpu.registry import without

    with ExitStack() as stack:
        for name in fixes:
            stack.enter_context(without(name))
        return function(rank, *args)
