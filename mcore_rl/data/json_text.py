"""JSON that people bring, as values that every later part can take: whole characters, nesting that fits a stack."""

from __future__ import annotations

import json
import re
from typing import Any

from mcore_rl.errors import DataError

MAX_NESTING = 100
"""Python's own parser, pickle and json.dumps recurse, up to a limit that depends on where they are called."""
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""The escape of half a surrogate pair, of which there are mostly two."""


class HalfCharacterError(DataError):
    """A string with half of a surrogate pair, which neither a tokenizer nor a file takes."""


def parse_json(text: str, where: str) -> Any:
    """The value of a JSON text. `where` starts error messages.

    Raises: DataError for what is not JSON or nested deeper than MAX_NESTING; HalfCharacterError.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep(where) from None
    except ValueError as error:
        raise DataError(f"{where} is not valid JSON: {error}") from error
    if text.count("[") + text.count("{") > MAX_NESTING or _HALF.search(text):
        _check(value, where)
    return value


def _check(value: Any, where: str) -> None:
    pending: list[tuple[Any, str, int]] = [(value, "", 0)]
    while pending:
        part, name, depth = pending.pop()
        if depth > MAX_NESTING:
            raise _too_deep(where)
        if isinstance(part, dict):
            pending += [(item, f"{name}.{key}" if name else key, depth + 1) for key, item in part.items()]
            pending += [(key, "a name", depth) for key in part]
        elif isinstance(part, list):
            pending += [(item, name, depth + 1) for item in part]
        elif isinstance(part, str):
            _check_characters(part, name, where)


def _check_characters(text: str, name: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise HalfCharacterError(
            f"{where}: {ascii(name)[1:-1] or 'a string'} holds half of a character (\\u{ord(text[error.start]):04x}, of"
            " which a cut emoji leaves one); write the whole character, or \\ufffd in its place"
        ) from None


def _too_deep(where: str) -> DataError:
    return DataError(f"{where} is nested more than {MAX_NESTING} deep; flatten it")
