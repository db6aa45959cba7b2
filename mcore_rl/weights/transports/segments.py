"""Memory of staging buffers, which several processes map: host memory, or GPU memory through CUDA IPC.

CUDA IPC was not run on a GPU yet. Its memory must come from cudaMalloc: with
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True it has no IPC handle.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import pickle
import secrets
from pathlib import Path

import psutil
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from mcore_rl.errors import ConfigError, WeightSyncError
from mcore_rl.weights.transports.hosts import remove_abandoned

PREFIX = "mcore_rl"
SHARED_MEMORY = Path("/dev/shm")
_DEVICE = 6
"""Position of the device number among the arguments of rebuild_cuda_tensor (torch 2.13)."""


class SharedSegment:
    """Shared memory segment, mapped in this process. `memory` contains its bytes.

    One process creates the file, the others attach by name, then the name is unlinked: from then on the memory lives
    only in the mappings, and nothing remains in /dev/shm even if processes are killed.
    """

    def __init__(self, name: str, memory: mmap.mmap) -> None:
        self.name = name
        self.memory = torch.frombuffer(memory, dtype=torch.uint8)

    @classmethod
    def create(cls, num_bytes: int) -> SharedSegment:
        """Create a segment with all pages present.

        Raises: ConfigError if the shared memory of this machine is too small.
        """
        remove_abandoned(SHARED_MEMORY)
        needed, available = max(num_bytes, mmap.PAGESIZE), _available_bytes()
        if needed > available:
            raise ConfigError(
                f"{SHARED_MEMORY} has room for {available / 2**20:.0f} MiB, not for {needed / 2**20:.0f} MiB of weight "
                "buckets; lower weights.bucket_mib or weights.num_buckets, or give this machine more memory"
            )
        name = f"{PREFIX}_{os.getpid()}_{secrets.token_hex(4)}"
        path = SHARED_MEMORY / name
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # remove_abandoned() deletes segments that nobody locks. Unlike a process id, a lock is also visible in
            # other pid namespaces.
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            # Without this reservation a full /dev/shm causes a SIGBUS in the middle of a copy.
            os.posix_fallocate(descriptor, 0, needed)
            return cls(name, _map(descriptor))
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(descriptor)

    @classmethod
    def attach(cls, name: str) -> SharedSegment:
        """Map an existing segment.

        Raises: WeightSyncError if it does not exist any more.
        """
        try:
            descriptor = os.open(SHARED_MEMORY / name, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise WeightSyncError(
                f"shared memory {name} of the weight sync is gone: created on another host, or unlinked too early"
            ) from None
        try:
            return cls(name, _map(descriptor))
        finally:
            os.close(descriptor)

    def unlink(self) -> None:
        """Remove the name. Call after all processes have attached; further calls do nothing."""
        with contextlib.suppress(FileNotFoundError):
            (SHARED_MEMORY / self.name).unlink()

    def close(self) -> None:
        """Unmap the memory, unless views of it still exist; further calls do nothing."""
        self.__dict__.pop("memory", None)


class DeviceSegment:
    """GPU memory mapped in this process. `memory` contains its bytes; other processes attach by `name`. The contents
    never pass through the host."""

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


Segment = SharedSegment | DeviceSegment
SEGMENTS: dict[bool, type[SharedSegment] | type[DeviceSegment]] = {False: SharedSegment, True: DeviceSegment}
"""Type of a staging buffer's memory: host memory (False) or GPU memory (True)."""


def device_uuid(number: int | None = None) -> str:
    """Return the UUID of this process's GPU, or of visible GPU `number`; "" without CUDA."""
    if not torch.cuda.is_available():
        return ""
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device() if number is None else number).uuid}"


def _available_bytes() -> int:
    """Return the bytes that can be reserved without the kernel killing a process for memory.

    The free space of a tmpfs is not enough: its limit may exceed the memory that is available.
    """
    disk = os.statvfs(SHARED_MEMORY)
    return min(disk.f_bavail * disk.f_frsize, psutil.virtual_memory().available)


def _map(descriptor: int) -> mmap.mmap:
    # The mapping duplicates the descriptor, and with it holds the lock; any other descriptor would keep the memory
    # allocated after the mapping is gone.
    # MAP_POPULATE: page faults would make the first copy ten times slower.
    return mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
