"""Signals between the processes that map a staging buffer: a slot may be written, or has been written.

A signal is a POSIX semaphore in shared memory, one per ordered pair of users. It costs microseconds, a control message
through gloo about a millisecond. Each user locks a byte of the shared memory's file. The kernel releases the lock when
the process ends, for any reason and in any namespace, so waiting users notice the loss.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import time
import weakref

import torch

from mcore_rl.errors import PeerLostError
from mcore_rl.weights.transports.segments import SHARED_MEMORY, SharedSegment

SECONDS_BETWEEN_CHECKS = 0.1
"""A waiting user checks at this interval that the other one is still there."""
_SEMAPHORE_BYTES = 64
"""One cache line; sem_t is smaller on all platforms."""
_COUNT_BYTES = 8
_LOCK = "hhqqi"
"""struct flock: type, whence, start, length, pid."""
_libc = ctypes.CDLL(None, use_errno=True)


class _Time(ctypes.Structure):
    """struct timespec."""

    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class Signals:
    """Signals of a staging buffer with `num_slots` slots, mapped in this process. Its users are numbered from 0."""

    def __init__(self, segment: SharedSegment, num_users: int, num_slots: int) -> None:
        self.name = segment.name
        self._segment = segment
        self._num_users, self._num_slots = num_users, num_slots
        # Not the mapping's descriptor: locks belong to an open file, and each user opens its own.
        self._file = os.open(SHARED_MEMORY / segment.name, os.O_RDWR | os.O_CLOEXEC)
        _opened.add(self)

    @classmethod
    def create(cls, num_users: int, num_slots: int) -> Signals:
        """Create the signals of a new buffer.

        Raises: ConfigError if the shared memory of this machine is too small.
        """
        num_bytes = num_users * num_users * _SEMAPHORE_BYTES + num_users * num_slots * _COUNT_BYTES
        signals = cls(SharedSegment.create(num_bytes), num_users, num_slots)
        for source in range(num_users):
            for target in range(num_users):
                _libc.sem_init(_address(signals._semaphore(source, target)), 1, 0)
        return signals

    @classmethod
    def attach(cls, name: str, num_users: int, num_slots: int) -> Signals:
        """Map the signals that another process has created.

        Raises: WeightSyncError if they do not exist any more.
        """
        return cls(SharedSegment.attach(name), num_users, num_slots)

    def join(self, user: int) -> None:
        """Take part as this user until `leave`, or the end of this process. All users join before the first wait."""
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _lock(fcntl.F_WRLCK, user))

    def leave(self) -> None:
        """End all participation of this object: users that wait for it fail. Further calls do nothing."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def post(self, source: int, target: int) -> None:
        """Send one signal; writes to memory before it are visible to the target after its wait."""
        _libc.sem_post(_address(self._semaphore(source, target)))

    def wait(self, source: int, target: int, *, timeout_seconds: float, name: str) -> None:
        """Wait for one signal of `source`, whose name in errors is `name`.

        Raises: PeerLostError if it has left or ended, or sends nothing within the timeout.
        """
        semaphore, deadline = self._semaphore(source, target), time.monotonic() + timeout_seconds
        while not _acquired(semaphore, min(SECONDS_BETWEEN_CHECKS, timeout_seconds)):
            if not self._is_present(source):
                if _acquired(semaphore, 0):
                    return  # sent just before the end
                raise PeerLostError(f"{name}: it has closed its staging buffer, or ended")
            if time.monotonic() > deadline:
                raise PeerLostError(f"{name}: no answer within {timeout_seconds:g} s")

    def set_bytes_written(self, user: int, slot: int, num_bytes: int) -> None:
        """Record how much a user has written to a slot. Call before `post`."""
        self._count(user, slot).value = num_bytes

    def bytes_written(self, user: int, slot: int) -> int:
        """Return how much a user has written to a slot. Call after `wait`, until the slot is free again."""
        return self._count(user, slot).value

    def unlink(self) -> None:
        """Remove the name. Call after all processes have attached; further calls do nothing."""
        self._segment.unlink()

    def close(self) -> None:
        """Leave, and unmap the memory; further calls do nothing."""
        self.leave()
        self._segment.close()

    def _is_present(self, user: int) -> bool:
        if self._file < 0:
            return False  # this process has left too
        found = fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, _lock(fcntl.F_WRLCK, user))
        return struct.unpack(_LOCK, found[: struct.calcsize(_LOCK)])[0] != fcntl.F_UNLCK

    def _semaphore(self, source: int, target: int) -> torch.Tensor:
        """Return a view of the semaphore. The memory stays mapped while the view exists, even if another thread
        closes."""
        start = (source * self._num_users + target) * _SEMAPHORE_BYTES
        return self._segment.memory[start : start + _SEMAPHORE_BYTES]

    def _count(self, user: int, slot: int) -> ctypes.c_int64:
        start = self._num_users * self._num_users * _SEMAPHORE_BYTES
        index = user * self._num_slots + slot
        return ctypes.c_int64.from_address(self._segment.memory.data_ptr() + start + index * _COUNT_BYTES)


_opened: weakref.WeakSet[Signals] = weakref.WeakSet()


def _leave_all() -> None:
    for signals in list(_opened):
        signals.leave()


# A forked child shares its parent's locks. They must end with the parent, also if the child lives longer.
os.register_at_fork(after_in_child=_leave_all)


def _address(semaphore: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(semaphore.data_ptr())


def _acquired(semaphore: torch.Tensor, seconds: float) -> bool:
    """Take one signal if it arrives within this time."""
    if _libc.sem_trywait(_address(semaphore)) == 0:
        return True
    until = time.time() + seconds
    deadline = _Time(int(until), int(until % 1 * 1e9))
    while seconds and _libc.sem_timedwait(_address(semaphore), ctypes.byref(deadline)) != 0:
        if ctypes.get_errno() != errno.EINTR:  # Python has handled the signal of the operating system
            return False
    return bool(seconds)


def _lock(kind: int, user: int) -> bytes:
    return struct.pack(_LOCK, kind, os.SEEK_SET, user, 1, 0).ljust(32, b"\0")
