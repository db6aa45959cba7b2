"""Checks that a path is a regular file inside its directory.

A named pipe blocks the reader, a device can return endless data, and a symbolic link can point to any file of the user.
The only links that may leave the directory are in the Hugging Face cache: `snapshots/<commit>/<file>` points to
`blobs/<hash>`.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from model_converters.errors import ConversionError

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def special_kind(file: Path) -> str | None:
    """Return the kind of a path that is not a regular file, after following links; None if it is one or is missing."""
    try:
        mode = file.stat().st_mode
    except OSError:
        return None
    return _kind(mode)


def open_regular(file: Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises: ConversionError naming any other kind of file, without blocking on it; OSError.
    """
    kind = special_kind(file)
    if kind is None:
        # O_NONBLOCK: the path may have been replaced by a named pipe since the check above.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        kind = _kind(os.fstat(descriptor).st_mode)
        if kind is None:
            return os.fdopen(descriptor, "rb")
        os.close(descriptor)
    raise ConversionError(f"{file} is {kind}; it must be a regular file")


def outside_target(file: Path, directory: Path) -> Path | None:
    """Return the target of a path that leaves `directory` (by `..`, an absolute path or a symbolic link), else None.

    Links of a Hugging Face cache snapshot may point to the cache's `blobs`.

    Raises: ConversionError for a loop of symbolic links.
    """
    home = directory.resolve()
    try:
        target = file.resolve()
    except (RuntimeError, OSError):  # RuntimeError: pathlib before Python 3.13
        raise ConversionError(f"{file} is a loop of symbolic links; replace it by a copy of the file") from None
    if target.is_relative_to(home):
        return None
    is_blob = home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"
    return None if is_blob else target


def require_inside(file: Path, directory: Path) -> None:
    """Reject a path that leaves `directory`.

    Raises: ConversionError naming the path and its target.
    """
    target = outside_target(file, directory)
    if target is not None:
        raise ConversionError(
            f"{file} leaves the model directory: it points to {target}; replace it by a copy of the file, or remove it"
        )


def _kind(mode: int) -> str | None:
    if stat.S_ISREG(mode):
        return None
    return next((name for test, name in _KINDS if test(mode)), "not a regular file")
