"""Staging buffers in shared memory."""

from __future__ import annotations

import os
from pathlib import Path

from mcore_rl.weights.transports.segments import SharedSegment


def open_files() -> list[str]:
    """Return the paths of this process's open files."""
    links = [Path("/proc/self/fd") / number for number in os.listdir("/proc/self/fd")]
    return [os.readlink(link) for link in links if link.is_symlink()]  # the descriptor of the listing itself is closed


def test_shared_segment_closed_keeps_no_memory() -> None:
    owner = SharedSegment.create(10)
    reader = SharedSegment.attach(owner.name)
    owner.unlink()
    reader.memory.fill_(1)
    assert int(owner.memory.sum()) == owner.memory.numel()
    for segment in owner, reader:
        segment.close()
        segment.close()
    # An open descriptor of an unlinked file would keep its memory.
    assert not [path for path in open_files() if owner.name in path]
