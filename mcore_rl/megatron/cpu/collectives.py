"""Fixes for collectives that gloo does not support. Upstream: torch 2.13 gloo, called by megatron-core 0.16.1."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mcore_rl.megatron.cpu.proxy import DISTRIBUTED
from mcore_rl.megatron.cpu.registry import Fix, fix


def all_gather(
    outputs: list[torch.Tensor],
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Variant of dist.all_gather that supports outputs of different sizes, like NCCL.

    Collective: every rank of `group`, with the same sizes.
    """
    if len({output.shape for output in outputs}) == 1:
        return dist.all_gather(outputs, tensor, group=group, async_op=async_op)
    assert not async_op, "an uneven all_gather on gloo cannot be asynchronous"
    # gloo has no all_gather of different sizes: one broadcast per rank.
    for source, output in enumerate(outputs):
        part = tensor.contiguous() if source == dist.get_rank(group) else torch.empty_like(output)
        dist.broadcast(part, group_src=source, group=group)
        output.copy_(part)
    return None


def reduce_scatter(
    output: torch.Tensor,
    inputs: list[torch.Tensor],
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Variant of dist.reduce_scatter that supports inputs of different sizes, like NCCL.

    Collective: every rank of `group`, with the same sizes.
    """
    if len({part.shape for part in inputs}) == 1:
        return dist.reduce_scatter(output, inputs, op=op, group=group, async_op=async_op)
    assert not async_op, "an uneven reduce_scatter on gloo cannot be asynchronous"
    # gloo has no reduce_scatter of different sizes: one all_reduce per rank, of which the owner keeps the result.
    for owner, part in enumerate(inputs):
        total = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, op=op, group=group)
        if owner == dist.get_rank(group):
            output.copy_(total)
    return None


@fix("uneven_collectives")
def _uneven_collectives(this: Fix, _: None) -> None:
    """Support gathers of different sizes. Experts sharded by EP and ETP gather token lists of different lengths; gloo
    raises an error or reads beyond the end of the shorter one."""
    this.patch(DISTRIBUTED, "all_gather", all_gather)
    this.patch(DISTRIBUTED, "reduce_scatter", reduce_scatter)
