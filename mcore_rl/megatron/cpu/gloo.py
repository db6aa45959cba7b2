"""Fixes of gloo in torch 2.13: collectives that it does not support, and a device for each group."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from mcore_rl.megatron.cpu.hook import DISTRIBUTED
from mcore_rl.megatron.cpu.registry import Fix, fix

THREADS_PER_DEVICE = 2
"""Threads per group and device that run collectives; torch's default."""
_Group = dist.ProcessGroupGloo


def all_gather(
    outputs: list[torch.Tensor], tensor: torch.Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> dist.Work | None:
    """Gather like dist.all_gather, but support outputs of different sizes, like NCCL.

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
    """Reduce like dist.reduce_scatter, but support inputs of different sizes, like NCCL.

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


class _SharedDeviceMeta(type):
    """Creates torch's own groups with a shared device; every ProcessGroupGloo counts as an instance.

    torch.distributed creates gloo groups by calling this name, and also tests instances with it.
    """

    def __call__(cls, store: dist.Store, rank: int, size: int, *, timeout: timedelta) -> dist.ProcessGroupGloo:
        options = _Group._Options()
        # The process id is a key of the cache: after a fork the child needs devices with threads of its own.
        options._devices = _devices(os.getpid(), os.environ.get("GLOO_SOCKET_IFNAME", ""))
        options._threads = THREADS_PER_DEVICE * len(options._devices)
        options._timeout = timeout
        return _Group(store, rank, size, options)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Group)


class GlooGroup(metaclass=_SharedDeviceMeta):
    """Replacement for ProcessGroupGloo whose groups share one device."""


@cache
def _devices(process: int, interfaces: str) -> list[object]:
    """Return Gloo devices of process `process`. Cached per process, because threads do not survive a fork."""
    if not interfaces:
        return [_Group.create_default_device()]
    return [_Group.create_device(interface=name) for name in interfaces.split(",")]


@fix("one_gloo_device")
def _one_gloo_device(this: Fix, _: None) -> None:
    """Share one gloo device among all groups. Each device has a thread that wakes up 100 times per second, and Megatron
    creates 20 to 50 groups; these wake-ups take a considerable part of a laptop's cores."""
    this.patch(distributed_c10d, "ProcessGroupGloo", GlooGroup)
