"""The shared memory of one host that buckets go through.

Bucket i lives in slot i % num_slots of one shared segment, so that slot i + 1 can be written while slot i is read.

    plan      bucket 0 | bucket 1 | bucket 2 | bucket 3
    segment   slot 0   | slot 1   | slot 0   | slot 1
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from mcore_rl.errors import ConfigError, WeightSyncError

if TYPE_CHECKING:
    pass
from mcore_rl.weights.plan import BucketEntry, BucketSpec

PREFIX = "mcore_rl"


SHARED_MEMORY = Path("/dev/shm")


class SharedBuckets:
    """One mapping of the shared segment in this process.

    The creator makes the file, everybody attaches by spec, then anyone calls unlink(): from there on the memory lives
    only in the mappings, and nothing is left in /dev/shm whichever process is killed.
    """

    def __init__(self, spec: BucketSpec, memory: mmap.mmap, descriptor: int) -> None:
        self.spec = spec
        self._memory: torch.Tensor | None = torch.frombuffer(memory, dtype=torch.uint8)
        self._descriptor = descriptor

    @classmethod
    def create(cls, spec: BucketSpec) -> SharedBuckets:
        """Makes the segment, with every page present; `.spec` of the result names it.

        Raises: ConfigError when the shared memory of this machine is too small.
        """
        remove_stale()
        spec = replace(spec, segment=f"{PREFIX}_{os.getpid()}_{secrets.token_hex(4)}")
        needed, available = _segment_bytes(spec), _available_bytes()
        if needed > available:
            raise ConfigError(
                f"{SHARED_MEMORY} has room for {available / 2**20:.0f} MiB, not for {needed / 2**20:.0f} MiB of weight "
                "buckets; lower weights.bucket_mib or weights.num_buckets, or give this machine more memory"
            )
        path = SHARED_MEMORY / spec.segment
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
        return cls(spec, _map(descriptor, spec), descriptor)

    @classmethod
    def attach(cls, spec: BucketSpec) -> SharedBuckets:
        """Maps an existing segment.

        Raises: WeightSyncError when it is gone.
        """
        try:
            descriptor = os.open(SHARED_MEMORY / spec.segment, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise WeightSyncError(
                f"shared weight buckets {spec.segment} are gone: created on another host, or unlinked too early"
            ) from None
        return cls(spec, _map(descriptor, spec), descriptor)

    def unlink(self) -> None:
        """Removes the name; call once all have attached. Calling again is harmless."""
        with contextlib.suppress(FileNotFoundError):
            (SHARED_MEMORY / self.spec.segment).unlink()

    def close(self) -> None:
        """Drops this process's mapping once no tensor refers to it any more."""
        self._memory = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def view(self, index: int, entry: BucketEntry) -> torch.Tensor:
        """The entry's rows in the shared memory.

        Shapes: entry.chunk_shape.
        """
        if self._memory is None:
            raise WeightSyncError(f"shared weight buckets {self.spec.segment} are closed")
        start = self.spec.slot(index) * self.spec.slot_bytes + entry.offset
        return self._memory[start : start + entry.nbytes].view(entry.dtype).view(entry.chunk_shape)


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


def _segment_bytes(spec: BucketSpec) -> int:
    return max(spec.slot_bytes * spec.num_slots, mmap.PAGESIZE)


def _available_bytes() -> int:
    """What can be reserved without another process being killed for it: the kernel hands out pages of a file system in
    memory until memory itself is gone, whatever the limit of that file system says."""
    disk = os.statvfs(SHARED_MEMORY)
    return min(disk.f_bavail * disk.f_frsize, psutil.virtual_memory().available)


def _map(descriptor: int, spec: BucketSpec) -> mmap.mmap:
    # Populated now: a page fault in the first copy costs ten times the copy.
    return mmap.mmap(descriptor, _segment_bytes(spec), flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
