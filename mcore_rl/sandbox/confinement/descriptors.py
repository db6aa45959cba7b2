"""Bytes that a sandbox reads from a descriptor which it inherits."""

from __future__ import annotations

import os


def in_memory(name: str, content: bytes) -> int:
    """A descriptor from which `content` can be read, of no file."""
    descriptor = os.memfd_create(name)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
