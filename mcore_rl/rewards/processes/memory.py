"""How much memory a process and all that it has started hold, as Linux tells it."""

from __future__ import annotations

import os
from pathlib import Path

MIB = 2**20
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes(pid: int) -> int:
    """Of the process, its children and theirs; 0 for what has ended, or where nothing tells."""
    total, pending = 0, [pid]
    while pending:
        directory = Path(f"/proc/{pending.pop()}")
        try:
            total += int((directory / "statm").read_text().split()[1]) * _PAGE_BYTES
            for thread in (directory / "task").iterdir():  # each has the children that it started
                pending += map(int, (thread / "children").read_text().split())
        except (OSError, IndexError):
            continue
    return total
