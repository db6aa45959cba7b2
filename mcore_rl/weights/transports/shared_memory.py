"""Shared host memory for staging buffers: trainer ranks write it, engine ranks read it."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
from pathlib import Path

import psutil
import torch

from mcore_rl.errors import ConfigError, WeightSyncError

PREFIX = "mcore_rl"
SHARED_MEMORY = Path("/dev/shm")


class SharedSegment:
    """Shared memory segment, mapped in this process. `memory` contains its bytes.

    One process creates the file, the others attach by name, then the name is unlinked: from then on the memory lives
    only in the mappings, and nothing remains in /dev/shm even if processes are killed.
    """

    def __init__(self, name: str, memory: mmap.mmap, descriptor: int) -> None:
        self.name = name
        self.memory = torch.frombuffer(memory, dtype=torch.uint8)
        self._descriptor = descriptor

    @classmethod
    def create(cls, num_bytes: int) -> SharedSegment:
        """Create a segment with all pages present.

        Raises: ConfigError if the shared memory of this machine is too small.
        """
        remove_stale()
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
            # Locked while this process lives: remove_stale() detects dead creators by it, also in other pid namespaces.
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            # Without this reservation a full /dev/shm causes a SIGBUS in the middle of a copy.
            os.posix_fallocate(descriptor, 0, needed)
        except OSError:
            os.close(descriptor)
            path.unlink()
            raise
        return cls(name, _map(descriptor), descriptor)

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
        return cls(name, _map(descriptor), descriptor)

    def unlink(self) -> None:
        """Remove the name. Call after all processes have attached; further calls do nothing."""
        with contextlib.suppress(FileNotFoundError):
            (SHARED_MEMORY / self.name).unlink()

    def close(self) -> None:
        """Drop this process's mapping. It is unmapped when no tensor refers to it any more."""
        self.memory = torch.empty(0, dtype=torch.uint8)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def remove_stale() -> list[str]:
    """Remove segments whose creators died before they were unlinked. Returns their names."""
    removed = []
    for path in SHARED_MEMORY.glob(f"{PREFIX}_*_*"):
        pid = path.name.split("_")[-2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and _unlock(path):
            removed.append(path.name)
    return removed


def _unlock(path: Path) -> bool:
    """Unlink the file unless a living process of another pid namespace holds its lock."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            return True
        finally:
            os.close(descriptor)
    return False


def _available_bytes() -> int:
    """Return the bytes that can be reserved without the kernel killing a process for memory.

    The free space of a tmpfs is not enough: its limit may exceed the memory that is available.
    """
    disk = os.statvfs(SHARED_MEMORY)
    return min(disk.f_bavail * disk.f_frsize, psutil.virtual_memory().available)


def _map(descriptor: int) -> mmap.mmap:
    # MAP_POPULATE: page faults would make the first copy ten times slower.
    return mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
