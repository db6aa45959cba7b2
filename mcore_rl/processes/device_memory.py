"""Memory of the GPU that this process uses."""

from __future__ import annotations

import torch

from mcore_rl.types import DeviceMemory


def device_memory() -> DeviceMemory | None:
    """Measure the current GPU; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    return DeviceMemory(f"GPU-{uuid}", total - free, total, torch.cuda.memory_reserved())
