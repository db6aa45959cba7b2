"""What the ranks of a tensor-parallel group hold of one parameter."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mcore_rl.megatron import cpu

cpu.install()

from megatron.core import parallel_state  # noqa: E402


def gather_shards(tensor: torch.Tensor, expert: bool) -> list[torch.Tensor]:
    """By rank of the tensor-parallel group, of experts the expert-tensor-parallel one, over which it is collective."""
    if expert:
        group = parallel_state.get_expert_tensor_parallel_group()
    else:
        group = parallel_state.get_tensor_model_parallel_group()
    shards = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, tensor, group=group)
    return shards
