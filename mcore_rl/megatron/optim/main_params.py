"""Main parameters, which Megatron's optimizers update, the corresponding model parameters, and DDP's buffers.

| optimizer | main parameter | this rank holds |
|---|---|---|
| DistributedOptimizer, bfloat16 | float32 copy | a range of the flattened parameter, by data-parallel rank |
| DistributedOptimizer, float32 | the parameter itself | a range of the flattened parameter, by data-parallel rank |
| Float16OptimizerWithFloat16Params | float32 copy | the whole parameter, on every data-parallel rank |
| FP32Optimizer | the parameter itself | the whole parameter, on every data-parallel rank |
| FP32Optimizer, sharded parameters (model/shards.py) | the shard itself, float32 | rows, by data-parallel rank |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer, MegatronOptimizer

from mcore_rl.megatron.model.shards import shard_of
from mcore_rl.megatron.optim.sharded_parallel import ShardedDataParallel


def parameter_buffers(chunk: torch.nn.Module) -> list[_ParamAndGradBuffer]:
    """Return DDP's buffers of a chunk, of dense and expert parameters; none for a model that is not trained or whose
    parameters are sharded."""
    if not isinstance(chunk, DistributedDataParallel):
        return []
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


def gradient_tensors(chunk: torch.nn.Module) -> list[torch.Tensor]:
    """Return tensors that together contain the accumulated gradients of this rank: DDP's buffers, or one per shard."""
    if isinstance(chunk, ShardedDataParallel):
        return [parameter.main_grad for parameter in chunk.parameters() if parameter.requires_grad]
    return [buffer.grad_data for buffer in parameter_buffers(chunk)]


def finish_copies() -> None:
    """Block until queued copies between device and host are done."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


@dataclass(frozen=True)
class MainParameter:
    """A main parameter: the elements [start, stop) of the flattened parameter `model`.

    sharded: data-parallel ranks hold different elements. is_copy: `main` is a float32 copy; otherwise it shares the
    memory of `model`. A shard (model/shards.py) is both `model` and `main`.
    """

    model: torch.Tensor
    main: torch.Tensor
    start: int
    sharded: bool
    is_copy: bool

    @property
    def stop(self) -> int:
        return self.start + self.main.numel()


def optimizer_parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the optimizers of a chain (dense and expert parameters) that have parameters on this rank."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if part.optimizer is not None]


def main_parameters(part: MegatronOptimizer) -> Iterator[MainParameter]:
    """Yield the main parameters of one optimizer of a chain."""
    ranges = isinstance(part, DistributedOptimizer)
    for model, main, is_copy in _pairs(part):
        start = part._get_model_param_range_map(model)["param"].start if ranges else 0
        yield MainParameter(model, main, start, ranges or shard_of(model) is not None, is_copy)


def _pairs(part: MegatronOptimizer) -> Iterator[tuple[torch.Tensor, torch.Tensor, bool]]:
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
