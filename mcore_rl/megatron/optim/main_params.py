"""Main parameters, which Megatron's optimizers update, and the corresponding model parameters.

| optimizer | main parameter | this rank holds |
|---|---|---|
| DistributedOptimizer, bfloat16 | float32 copy | a range of the flattened parameter, by data-parallel rank |
| DistributedOptimizer, float32 | the parameter itself | a range of the flattened parameter, by data-parallel rank |
| Float16OptimizerWithFloat16Params | float32 copy | the whole parameter, on every data-parallel rank |
| FP32Optimizer | the parameter itself | the whole parameter, on every data-parallel rank |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mcore_rl.megatron import cpu

cpu.install()

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402
from megatron.core.optimizer.optimizer import (  # noqa: E402
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)


@dataclass(frozen=True)
class MainParameter:
    """A main parameter: the elements [start, start + main.numel()) of the flattened parameter `model`.

    sharded: data-parallel ranks hold different ranges. is_copy: `main` is a float32 copy; otherwise it shares the
    memory of `model`.
    """

    model: torch.Tensor
    main: torch.Tensor
    start: int
    sharded: bool
    is_copy: bool


def optimizer_parts(optimizer: MegatronOptimizer) -> list[Any]:
    """Optimizers of a chain (dense and expert parameters) that have parameters on this rank."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if part.optimizer is not None]


def main_parameters(part: Any) -> Iterator[MainParameter]:
    """Main parameters of one optimizer of a chain."""
    sharded = isinstance(part, DistributedOptimizer)
    for model, main, is_copy in _pairs(part):
        start = part._get_model_param_range_map(model)["param"].start if sharded else 0
        yield MainParameter(model, main, start, sharded, is_copy)


def _pairs(part: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, bool]]:
    if isinstance(part, DistributedOptimizer):
        pairs = [(part.model_float16_groups, part.shard_fp32_from_float16_groups, True)]
        pairs.append((part.model_fp32_groups, part.shard_fp32_groups, False))
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        pairs = [(part.float16_groups, part.fp32_from_float16_groups, True)]
        pairs.append((part.fp32_from_fp32_groups, part.fp32_from_fp32_groups, False))
    else:
        assert isinstance(part, FP32Optimizer), f"unexpected optimizer {type(part).__name__}"
        groups = [group["params"] for group in part.optimizer.param_groups]
        pairs = [(groups, groups, False)]
    for models, mains, is_copy in pairs:
        for model_group, main_group in zip(models, mains, strict=True):
            for model, main in zip(model_group, main_group, strict=True):
                yield model, main, is_copy
