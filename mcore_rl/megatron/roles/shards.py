"""Shards of a parameter on the ranks of its tensor-parallel group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mcore_rl.megatron import cpu

cpu.install()

from megatron.core import parallel_state  # noqa: E402


def gather_shards(tensor: torch.Tensor, expert: bool) -> list[torch.Tensor]:
    """Return the shards of all ranks of the tensor-parallel group, in rank order.

    Collective: the tensor-parallel group, for experts the expert-tensor-parallel group.
    """
    if expert:
        group = parallel_state.get_expert_tensor_parallel_group()
    else:
        group = parallel_state.get_tensor_model_parallel_group()
    shards = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, tensor, group=group)
    return shards
