"""Gloo process groups that share one device. Upstream: torch 2.13 creates a device for each group."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache

import torch.distributed as dist
from torch.distributed import distributed_c10d

from mcore_rl.megatron.cpu.registry import Fix, fix

THREADS_PER_DEVICE = 2
"""Threads per group and device that run collectives; torch's default."""
_Group = dist.ProcessGroupGloo


class _SharedDeviceMeta(type):
    """Creates torch's own groups with a shared device; every ProcessGroupGloo counts as an instance.

    torch.distributed creates gloo groups by calling this name, and also tests instances with it.
    """

    def __call__(cls, store: dist.Store, rank: int, size: int, *, timeout: timedelta) -> dist.ProcessGroupGloo:
        options = _Group._Options()
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
    """Gloo devices of process `process`. Cached per process, because threads do not survive a fork."""
    if not interfaces:
        return [_Group.create_default_device()]
    return [_Group.create_device(interface=name) for name in interfaces.split(",")]


@fix("one_gloo_device")
def _one_gloo_device(this: Fix, _: None) -> None:
    """Share one gloo device among all groups. Each device has a thread that wakes up 100 times per second, and Megatron
    creates 20 to 50 groups; these wake-ups take a considerable part of a laptop's cores."""
    this.patch(distributed_c10d, "ProcessGroupGloo", GlooGroup)
