"""Reading of untrusted files: checks that a path is a regular file inside its directory, and strict JSON.

A named pipe blocks the reader, a device can return endless data, and a symbolic link can point to any file of the user.
The only links that may leave the directory are in the Hugging Face cache: `snapshots/<commit>/<file>` points to
`blobs/<hash>`.

The JSON reader rejects repeated keys, NaN, infinity and text that is not UTF-8: Python's reader accepts them, and other
readers of the same file may interpret them differently.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, TypeGuard

from model_converters.errors import ConversionError

_MAX_BYTES = 256 * 2**20
"""Maximum file size. The index of a model with 671 billion parameters has 9 MB."""
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


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


def require_inside(file: Path, directory: Path) -> None:
    """Reject a path that leaves `directory` (by `..`, an absolute path or a symbolic link).

    Links of a Hugging Face cache snapshot may point to the cache's `blobs`.

    Raises: ConversionError naming the path and its target, or a loop of symbolic links.
    """
    home = directory.resolve()
    try:
        target = file.resolve()
    except (RuntimeError, OSError):  # RuntimeError: pathlib before Python 3.13
        raise ConversionError(f"{file} is a loop of symbolic links; replace it by a copy of the file") from None
    is_blob = home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"
    if not (target.is_relative_to(home) or is_blob):
        raise ConversionError(
            f"{file} leaves the model directory: it points to {target}; replace it by a copy of the file, or remove it"
        )


def _kind(mode: int) -> str | None:
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "not a regular file")


def read_object(file: Path) -> dict[str, object]:
    """Read a file that contains one JSON object.

    Raises: ConversionError naming the file and the key; FileNotFoundError.
    """
    try:
        with open_regular(file) as opened:
            # One byte above the limit shows that the file is too large, whatever its size.
            raw = opened.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConversionError(f"{file} cannot be read: {error.strerror}") from error
    if len(raw) > _MAX_BYTES:
        raise ConversionError(f"{file} cannot be read as JSON: it has more than {_MAX_BYTES // 2**20} MiB")
    try:
        return parse_object(raw)
    except (ValueError, RecursionError) as error:
        raise ConversionError(f"{file} cannot be read as JSON: {error}") from error


def parse_object(raw: bytes) -> dict[str, object]:
    """Parse exactly one JSON object.

    Raises: ValueError for anything else; RecursionError for deep nesting.
    """
    value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unambiguous)
    if not isinstance(value, dict):
        raise ValueError(f"it holds {type(value).__name__}, not an object")
    return value


def _unambiguous(pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    # Lists are checked here; objects inside were checked by earlier calls, because the parser starts with the
    # innermost.
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} appears twice")
        if problem := _problem(value) or _problem(key):
            raise ValueError(f"the key {key!r} holds {problem}")
        found[key] = value
    return found


def _problem(value: object) -> str:
    """Return the part of a value, or of a list's items, that JSON does not allow; "" if there is none."""
    if isinstance(value, list):
        return next(filter(None, map(_problem, value)), "")
    if isinstance(value, float):
        return "" if math.isfinite(value) else "NaN or infinity, which JSON does not have"
    # Almost all names are ASCII; isascii() reads a flag of the string and needs no scan.
    if isinstance(value, str) and not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
        return "half of a surrogate pair"
    return ""


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a JSON value is a number. In Python, bool is a subclass of int."""
    return isinstance(value, int | float) and not isinstance(value, bool)
