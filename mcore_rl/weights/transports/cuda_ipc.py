"""GPU memory that several processes map through CUDA IPC. Its contents never pass through the host.

Not run on a GPU yet. The memory must come from cudaMalloc: with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True it has
no IPC handle.
"""

from __future__ import annotations

import pickle

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from mcore_rl.errors import WeightSyncError

_DEVICE = 6
"""Position of the device number among the arguments of rebuild_cuda_tensor (torch 2.13)."""


class DeviceSegment:
    """GPU memory mapped in this process. `memory` contains its bytes; other processes attach by `name`."""

    def __init__(self, name: str, memory: torch.Tensor) -> None:
        self.name = name
        self.memory = memory

    @classmethod
    def create(cls, num_bytes: int) -> DeviceSegment:
        """Allocate memory on this process's GPU. It lives as long as the object."""
        # An empty tensor has no storage and therefore no handle.
        memory = torch.empty(max(num_bytes, 1), dtype=torch.uint8, device="cuda")
        _, arguments = reduce_tensor(memory)
        return cls(pickle.dumps((device_uuid(), arguments)).hex(), memory)

    @classmethod
    def attach(cls, name: str) -> DeviceSegment:
        """Map the memory of another process of this run. Call once for all updates.

        Raises: WeightSyncError if its GPU is not visible to this process.
        """
        uuid, arguments = pickle.loads(bytes.fromhex(name))  # trusted: made by a rank of this run, passed on by Ray
        numbers = [n for n in range(torch.cuda.device_count()) if device_uuid(n) == uuid]
        if not numbers:
            raise WeightSyncError(f"a staging buffer of weights is on {uuid}, which is not visible to this process")
        # The same GPU may have another number in this process (CUDA_VISIBLE_DEVICES).
        here = (*arguments[:_DEVICE], numbers[0], *arguments[_DEVICE + 1 :])
        return cls(name, rebuild_cuda_tensor(*here))

    def unlink(self) -> None:
        """Do nothing: an IPC handle leaves no name behind."""


def device_uuid(number: int | None = None) -> str:
    """Return the UUID of this process's GPU, or of visible GPU `number`; "" without CUDA."""
    if not torch.cuda.is_available():
        return ""
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device() if number is None else number).uuid}"
