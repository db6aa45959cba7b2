"""Memory that processes of one host share: a window that trainer ranks write and engine ranks read."""

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
    """One mapping of a shared segment in this process; `memory` are its bytes.

    The creator makes the file, everybody attaches by name, then anyone calls unlink(): from there on the memory lives
    only in the mappings, and nothing is left in /dev/shm whichever process is killed.
    """

    def __init__(self, name: str, memory: mmap.mmap, descriptor: int) -> None:
        self.name = name
        self.memory = torch.frombuffer(memory, dtype=torch.uint8)
        self._descriptor = descriptor

    @classmethod
    def create(cls, num_bytes: int) -> SharedSegment:
        """Makes the segment, with every page present.

        Raises: ConfigError when the shared memory of this machine is too small.
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
            # Held while this process lives: how remove_stale() knows the dead, in other pid namespaces too.
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            # Without the reservation a full /dev/shm is a SIGBUS in the middle of a copy.
            os.posix_fallocate(descriptor, 0, needed)
        except OSError:
            os.close(descriptor)
            path.unlink()
            raise
        return cls(name, _map(descriptor), descriptor)

    @classmethod
    def attach(cls, name: str) -> SharedSegment:
        """Maps an existing segment.

        Raises: WeightSyncError when it is gone.
        """
        try:
            descriptor = os.open(SHARED_MEMORY / name, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise WeightSyncError(
                f"shared weight buckets {name} are gone: created on another host, or unlinked too early"
            ) from None
        return cls(name, _map(descriptor), descriptor)

    def unlink(self) -> None:
        """Removes the name; call once all have attached. Calling again is harmless."""
        with contextlib.suppress(FileNotFoundError):
            (SHARED_MEMORY / self.name).unlink()

    def close(self) -> None:
        """Drops this process's mapping once no tensor refers to it any more."""
        self.memory = torch.empty(0, dtype=torch.uint8)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def remove_stale() -> list[str]:
    """Removes segments whose creators died before all had attached; returns their names."""
    removed = []
    for path in SHARED_MEMORY.glob(f"{PREFIX}_*_*"):
        pid = path.name.split("_")[-2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and _unlock(path):
            removed.append(path.name)
    return removed


def _unlock(path: Path) -> bool:
    """Unlinks the file unless a living process of another pid namespace holds its lock."""
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
    """What can be reserved without another process being killed for it: the kernel hands out pages of a file system in
    memory until memory itself is gone, whatever the limit of that file system says."""
    disk = os.statvfs(SHARED_MEMORY)
    return min(disk.f_bavail * disk.f_frsize, psutil.virtual_memory().available)


def _map(descriptor: int) -> mmap.mmap:
    # Populated now: a page fault in the first copy costs ten times the copy.
    return mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
