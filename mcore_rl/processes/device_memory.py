"""Memory and identity of the GPUs of this process."""

from __future__ import annotations

import torch

from mcore_rl.types import DeviceMemory


def device_memory() -> DeviceMemory | None:
    """Measure the current GPU; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    device = gpu_uuid(torch.cuda.current_device())
    return DeviceMemory(device, total - free, total, torch.cuda.memory_reserved())


def gpu_uuid(number: int) -> str:
    """Return the UUID of GPU `number` of this process, with the prefix GPU-."""
    return f"GPU-{torch.cuda.get_device_properties(number).uuid}"
