"""Gloo groups that share one device. Upstream: torch 2.13 gives each group a device of its own."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from mcore_rl.megatron.cpu.registry import Fix, fix

THREADS_PER_DEVICE = 2
"""Of a group, which run its collectives: as torch has it."""
_Group = dist.ProcessGroupGloo


class _SharingDevice(type):
    """Groups made by it are torch's own, and every one of torch's is an instance."""

    def __call__(cls, store: dist.Store, rank: int, size: int, *, timeout: timedelta) -> dist.ProcessGroupGloo:
        options = _Group._Options()
        options._devices = _devices(os.getpid(), os.environ.get("GLOO_SOCKET_IFNAME", ""))
        options._threads = THREADS_PER_DEVICE * len(options._devices)
        options._timeout = timeout
        return _Group(store, rank, size, options)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _Group)


class GlooGroup(metaclass=_SharingDevice):
    """In the place of ProcessGroupGloo."""


@cache
def _devices(process: int, interfaces: str) -> list[Any]:
    """Of this process, as threads do not survive a fork."""
    if not interfaces:
        return [_Group.create_default_device()]
    return [_Group.create_device(interface=name) for name in interfaces.split(",")]


@fix("one_gloo_device")
def _one_gloo_device(this: Fix, _: None) -> None:
    """A device has a thread that wakes a hundred times a second, and megatron makes 20 to 50 groups: ranks that share a
    laptop's cores would spend a good part of them on waking. Groups of one device share the thread."""
    this.patch(distributed_c10d, "ProcessGroupGloo", GlooGroup)
