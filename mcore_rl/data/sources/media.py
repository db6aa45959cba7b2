"""Detection of columns with images, videos or audio, which no supported model family reads."""

from __future__ import annotations

import re
from collections.abc import Mapping

from mcore_rl.errors import DataError

_COLUMN = re.compile(
    r"(image|picture|video|audio)s?(_(url|path|file|bytes|data)s?)?|pixel_values|multi_?modal_(data|inputs)|mm_data"
)


def is_media(column: str) -> bool:
    """Return whether a column name denotes images, videos or audio."""
    return _COLUMN.fullmatch(column.lower()) is not None


def check_media(row: Mapping[str, object], key: str, where: str) -> None:
    """Reject a row with a non-empty media column.

    Raises: DataError naming row and column.
    """
    for column, value in row.items():
        if is_media(column) and not is_empty(value):
            raise DataError(
                f"{where} has {column}, but prompts are text only, and the model would be trained without it; set"
                f" {key} to a file without such rows, or without the column if the text suffices"
            )


def is_empty(value: object) -> bool:
    """Return whether a value is empty: null, NaN, an empty text or list, or a struct of empty fields."""
    if isinstance(value, Mapping):
        return all(map(is_empty, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_empty, value))
    return value is None or value in ("", b"") or value != value
