"""Bytes that this process has read of the files that it loads."""

from __future__ import annotations

from typing import NamedTuple


class Reading(NamedTuple):
    """`done` of `total` bytes of a load named `name`."""

    name: str
    done: int
    total: int


class ReadProgress:
    """Load that this process has begun last; other threads may look at it."""

    def __init__(self) -> None:
        self.current: Reading | None = None
        """None before the first load."""

    def update(self, name: str, done: int, total: int) -> None:
        # One assignment, so that a thread never sees parts of two states.
        self.current = Reading(name, done, total)


READS = ReadProgress()
"""The only instance: a process loads one model at a time."""
