"""Memory of a process tree, from Linux's /proc."""

from __future__ import annotations

import os
from pathlib import Path

MIB = 2**20
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process and its descendants; 0 if it has ended, or without /proc."""
    total, pending = 0, [pid]
    while pending:
        directory = Path(f"/proc/{pending.pop()}")
        try:
            total += int((directory / "statm").read_text().split()[1]) * _PAGE_BYTES
            for thread in (directory / "task").iterdir():  # Linux lists children by the thread that started them
                pending += map(int, (thread / "children").read_text().split())
        except (OSError, IndexError):
            continue
    return total
