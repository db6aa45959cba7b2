"""Data that a sandbox reads from an inherited descriptor."""

from __future__ import annotations

import os


def in_memory(name: str, content: bytes) -> int:
    """Return a descriptor of an anonymous memory file that contains `content`."""
    descriptor = os.memfd_create(name)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
