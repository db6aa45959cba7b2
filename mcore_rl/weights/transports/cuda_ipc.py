"""Memory of a GPU that processes share: what arrives in it never passes through the host. Not run on a GPU yet.

The memory must be cudaMalloc's own: with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True it has no handle.
"""

from __future__ import annotations

import pickle

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from mcore_rl.errors import WeightSyncError

_DEVICE = 6
"""Place of the device's number among the arguments of rebuild_cuda_tensor (torch 2.13)."""


class DeviceSegment:
    """One mapping of a piece of a GPU's memory in this process: `memory` are its bytes, others attach by `name`."""

    def __init__(self, name: str, memory: torch.Tensor) -> None:
        self.name = name
        self.memory = memory

    @classmethod
    def create(cls, num_bytes: int) -> DeviceSegment:
        """On this process's GPU; the memory lives as long as the object."""
        memory = torch.empty(max(num_bytes, 1), dtype=torch.uint8, device="cuda")
        _, arguments = reduce_tensor(memory)
        return cls(pickle.dumps((device_uuid(), arguments)).hex(), memory)

    @classmethod
    def attach(cls, name: str) -> DeviceSegment:
        """Maps the memory of another process of this run; once, for all updates.

        Raises: WeightSyncError where this process does not see its GPU.
        """
        uuid, arguments = pickle.loads(bytes.fromhex(name))  # of a rank of this run, by way of the driver
        numbers = [n for n in range(torch.cuda.device_count()) if device_uuid(n) == uuid]
        if not numbers:
            raise WeightSyncError(f"a window of weights is on {uuid}, which this process does not see")
        here = (*arguments[:_DEVICE], numbers[0], *arguments[_DEVICE + 1 :])
        return cls(name, rebuild_cuda_tensor(*here))

    def unlink(self) -> None:
        """It has no name that could be left behind."""


def device_uuid(number: int | None = None) -> str:
    """Of this process's GPU, or of another one that it sees; "" without one."""
    if not torch.cuda.is_available():
        return ""
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device() if number is None else number).uuid}"
