"""Durable and atomic writes. Every package may import this module; it uses the standard library only."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def durable_write(path: Path, *, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Write a file that appears complete or not at all, also after a crash of the machine.

    The content goes to a temporary file in the same directory, which replaces `path` at the end of the block. If the
    block raises, `path` is unchanged.

    mode: permissions before the umask.
    Raises: OSError, also if `path` is a directory, a device or a pipe.
    """
    # A rename would replace a device such as /dev/null for all processes of the machine.
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "it exists and is not a file", str(path))
    # The process id keeps two writers of one file apart; the last rename wins.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with os.fdopen(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            yield file
            # Without this the rename could reach the disk before the contents, and a crash would leave an empty file.
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    # The new name is durable only when its directory is on the disk.
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: object) -> None:
    """Write a durable JSON file.

    Raises: OSError.
    """
    with durable_write(path) as file:
        file.write(json.dumps(value, indent=2).encode() + b"\n")
