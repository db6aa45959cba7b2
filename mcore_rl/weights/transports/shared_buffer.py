"""Memory and signals of a staging buffer that several processes map."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mcore_rl.errors import ConfigError
from mcore_rl.weights.transports.segments import SEGMENTS, Segment
from mcore_rl.weights.transports.signals import Signals
from mcore_rl.weights.transports.topology import CUDA_IPC, StagingBuffer


@dataclass(frozen=True)
class Users:
    """Numbers of a buffer's users: the writers, the relay (in the owner's process), the readers."""

    buffer: StagingBuffer

    @property
    def count(self) -> int:
        return len(self.buffer.writers) + 1 + len(self.buffer.readers)

    @property
    def relay(self) -> int:
        return len(self.buffer.writers)

    @property
    def readers(self) -> range:
        return range(self.relay + 1, self.count)

    def writer(self, trainer_rank: int) -> int:
        return self.buffer.writers.index(trainer_rank)

    def reader(self, engine_rank: int) -> int:
        """Return the number of an engine rank, counted through all engines."""
        return self.readers[self.buffer.readers.index(engine_rank)]


class SharedNames(NamedTuple):
    """Names by which other processes map a buffer."""

    segment: str
    signals: str


class SharedBuffer(NamedTuple):
    """A staging buffer that is mapped in this process."""

    segment: Segment
    signals: Signals

    @classmethod
    def create(cls, buffer: StagingBuffer, slot_bytes: int, num_slots: int) -> SharedBuffer:
        """Create the memory of a buffer.

        Raises: ConfigError if this machine's shared memory, or this process's GPU, has too little memory.
        """
        segment = SEGMENTS[buffer.kind == CUDA_IPC].create(slot_bytes * num_slots)
        try:
            return cls(segment, Signals.create(Users(buffer).count, num_slots))
        except ConfigError:
            segment.unlink()
            segment.close()
            raise

    @classmethod
    def attach(cls, buffer: StagingBuffer, names: SharedNames, num_slots: int) -> SharedBuffer:
        """Map the memory that another process has created.

        Raises: WeightSyncError if it does not exist any more.
        """
        segment = SEGMENTS[buffer.kind == CUDA_IPC].attach(names.segment)
        return cls(segment, Signals.attach(names.signals, Users(buffer).count, num_slots))

    @property
    def names(self) -> SharedNames:
        return SharedNames(self.segment.name, self.signals.name)

    def unlink(self) -> None:
        """Remove the names; existing mappings stay valid. Further calls do nothing."""
        self.segment.unlink()
        self.signals.unlink()

    def close(self) -> None:
        """Unmap the memory; its owner frees it. Further calls do nothing.

        Raises: WeightSyncError if views of the memory still exist.
        """
        self.signals.close()
        self.segment.close()
