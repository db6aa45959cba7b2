"""Memory of staging buffers, which several processes map: host memory, or GPU memory through CUDA IPC."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import mmap
import os
import secrets
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import psutil
import torch

from mcore_rl.errors import ConfigError, WeightSyncError
from mcore_rl.weights.transports.hosts import remove_abandoned
from mcore_rl.weights.transports.ipc_memory import DeviceArray, Gpus, IpcMemory, TorchGpus

PREFIX = "mcore_rl"
SHARED_MEMORY = Path("/dev/shm")
HANDLE_FORMAT = 1
"""Version of DeviceHandle's fields."""


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


@dataclass(frozen=True)
class DeviceHandle:
    """Name of a DeviceSegment: its GPU's UUID, size, CUDA IPC handle in hexadecimal, and the owner's versions."""

    gpu: str
    num_bytes: int
    handle: str
    versions: str
    format: int = HANDLE_FORMAT


class DeviceSegment:
    """GPU memory mapped in this process. `memory` contains its bytes; other processes attach by `name`. The contents
    never pass through the host.

    The memory is released by `close`, or when neither the object nor a view of `memory` exists any more. Readers
    close before the owner: CUDA does not define what happens to mappings of freed memory.
    """

    gpus: ClassVar[Gpus] = TorchGpus()

    def __init__(self, name: str, memory: IpcMemory, number: int) -> None:
        self.name = name
        self._memory = memory
        array = DeviceArray(memory)
        self.memory = self.gpus.as_tensor(array, number)
        self._views = weakref.ref(array)

    @classmethod
    def create(cls, num_bytes: int) -> DeviceSegment:
        """Allocate memory on this process's current GPU.

        Raises: ConfigError if the GPU has too little free memory.
        """
        gpus, num_bytes = cls.gpus, max(num_bytes, 1)
        number = gpus.current()
        runtime = gpus.runtime
        with gpus.selected(number), ExitStack() as undo:
            pointer = _allocate(gpus, number, num_bytes)
            memory = IpcMemory(pointer, num_bytes, partial(_on, gpus, number, runtime.free))
            undo.callback(memory.close)
            handle = DeviceHandle(gpus.uuid(number), num_bytes, runtime.export(pointer).hex(), runtime.versions)
            segment = cls(json.dumps(asdict(handle)), memory, number)
            undo.pop_all()
        return segment

    @classmethod
    def attach(cls, name: str) -> DeviceSegment:
        """Map the memory of another process of this host. Call once for all updates.

        Raises: WeightSyncError if its GPU is not visible to this process, or the handle cannot be opened.
        """
        gpus, runtime, handle = cls.gpus, cls.gpus.runtime, json.loads(name)
        if handle.get("format") != HANDLE_FORMAT:
            raise WeightSyncError(
                f"a staging buffer of weights has a handle of format {handle.get('format')} (made with "
                f"{handle.get('versions')}), but this process reads format {HANDLE_FORMAT} ({runtime.versions}); start "
                "both from one checkout of mcore-rl"
            )
        shared = DeviceHandle(**handle)
        number = gpus.find(shared.gpu)
        if number is None:
            raise WeightSyncError(
                f"a staging buffer of weights is on {shared.gpu}, which is not visible to this process"
            )
        with gpus.selected(number), ExitStack() as undo:
            try:
                pointer = runtime.open(bytes.fromhex(shared.handle))
            except WeightSyncError as error:
                raise WeightSyncError(
                    f"a staging buffer of weights on {shared.gpu} cannot be mapped: {error}. It was made with "
                    f"{shared.versions}; this process has {runtime.versions}. Containers must share IPC and PID "
                    "namespaces (--ipc=host --pid=host); otherwise set weights.transport=shared_memory"
                ) from None
            memory = IpcMemory(pointer, shared.num_bytes, partial(_on, gpus, number, runtime.close))
            undo.callback(memory.close)
            segment = cls(name, memory, number)
            undo.pop_all()
        return segment

    def unlink(self) -> None:
        """Do nothing: an IPC handle leaves no name behind."""

    def close(self) -> None:
        """Free the memory in its owner, or unmap it in a reader; further calls do nothing. Readers close first, after
        their queued copies are complete.

        Raises: WeightSyncError if views of `memory` still exist; the memory stays valid.
        """
        self.__dict__.pop("memory", None)
        if self._views() is not None:
            gc.collect()  # frames of an earlier error refer to views, sometimes in a cycle
        if self._views() is not None:
            raise WeightSyncError("a staging buffer of weights is still in use by views of its memory")
        self._memory.close()


Segment = SharedSegment | DeviceSegment
SEGMENTS: dict[bool, type[SharedSegment] | type[DeviceSegment]] = {False: SharedSegment, True: DeviceSegment}
"""Type of a staging buffer's memory: host memory (False) or GPU memory (True)."""


def device_uuid() -> str:
    """Return the UUID of this process's GPU; "" without CUDA."""
    return TorchGpus().uuid(torch.cuda.current_device()) if torch.cuda.is_available() else ""


def _allocate(gpus: Gpus, number: int, num_bytes: int) -> int:
    """Return the address of new memory on the current GPU, `number`. Unused memory of torch's allocator yields.

    Raises: ConfigError if the GPU has too little free memory.
    """
    with contextlib.suppress(MemoryError):
        return gpus.runtime.allocate(num_bytes)
    gpus.empty_cache()
    try:
        return gpus.runtime.allocate(num_bytes)
    except MemoryError:
        free = gpus.runtime.free_bytes()
        raise ConfigError(
            f"{gpus.uuid(number)} has room for {free / 2**20:.0f} MiB, not for {num_bytes / 2**20:.0f} MiB of weight "
            "buckets; lower weights.bucket_mib, weights.num_buckets or rollout.gpu_memory_fraction"
        ) from None


def _on(gpus: Gpus, number: int, release: Callable[[int], None], pointer: int) -> None:
    with gpus.selected(number):
        release(pointer)


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
