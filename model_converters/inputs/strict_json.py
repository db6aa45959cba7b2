"""Strict JSON reader for untrusted files.

Rejects repeated keys, NaN, infinity and text that is not UTF-8: Python's reader accepts them, and other readers of the
same file may interpret them differently.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from model_converters.errors import ConversionError
from model_converters.inputs.regular_files import open_regular

_MAX_BYTES = 256 * 2**20
"""Maximum file size. The index of a model with 671 billion parameters has 9 MB."""


def read_object(file: Path) -> dict[str, Any]:
    """Read a file that contains one JSON object.

    Raises: ConversionError naming the file and the key; FileNotFoundError.
    """
    try:
        with open_regular(file) as opened:
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


def parse_object(raw: bytes) -> dict[str, Any]:
    """Parse exactly one JSON object.

    Raises: ValueError for anything else; RecursionError for deep nesting.
    """
    value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unambiguous)
    if not isinstance(value, dict):
        raise ValueError(f"it holds {type(value).__name__}, not an object")
    return value


def _unambiguous(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} appears twice")
        if not _is_finite(value):
            raise ValueError(f"the key {key!r} holds NaN or infinity, which JSON does not have")
        if not (_is_text(key) and _is_text(value)):
            raise ValueError(f"the key {key!r} holds half of a surrogate pair")
        found[key] = value
    return found


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, list) or all(map(_is_finite, value))


def _is_text(value: Any) -> bool:
    if isinstance(value, str):
        # Almost all names are ASCII; isascii() reads a flag of the string and needs no scan.
        return value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value)
    return not isinstance(value, list) or all(map(_is_text, value))
