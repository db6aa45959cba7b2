"""JSON of user files: parsing with checks of nesting and surrogate pairs, and conversion of values to JSON types."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from datetime import date, time
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from numbers import Real

from mcore_rl.errors import DataError
from mcore_rl.types.json import JsonValue

MAX_NESTING = 100
"""Limit of nesting. json, pickle and json.dumps recurse, and their limit depends on the depth of the caller."""
_MISSING = ("NAType", "NaTType")
"""Types of missing values in pandas."""
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
"""Escape of a surrogate. Most occur in valid pairs, so a match only triggers the full check."""


class LoneSurrogateError(DataError):
    """A string contains an unpaired surrogate, which can be neither tokenised nor written to a file."""


def parse_json(text: str, where: str, decode: Callable[[str], JsonValue] = json.loads) -> JsonValue:
    """Parse JSON text. `where` starts error messages. `decode`: method of a decoder that accepts less than json.loads.

    Raises: DataError for invalid JSON or nesting deeper than MAX_NESTING; LoneSurrogateError.
    """
    try:
        value = decode(text)
    except RecursionError:
        raise _too_deep(where) from None
    except ValueError as error:
        raise DataError(f"{where} is not valid JSON: {error}") from error
    # The expensive check, which names the place, runs only for texts that may fail it.
    if (text.count("[") + text.count("{") > MAX_NESTING and _is_deep(value)) or _SURROGATE_ESCAPE.search(text):
        _check(value, where)
    return value


def _is_deep(value: object) -> bool:
    """Return True if a value may be nested too deeply."""
    level = [value]
    for _ in range(MAX_NESTING):
        parts = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [part for each in parts for part in each if isinstance(part, dict | list)]
        if not level:
            return False
    return True


def _check(value: object, where: str) -> None:
    # An explicit stack instead of recursion: the value may be nested deeper than Python's stack allows.
    pending: list[tuple[object, str, int]] = [(value, "", 0)]
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
        raise LoneSurrogateError(
            f"{where}: {ascii(name)[1:-1] or 'a string'} contains half of a character (\\u{ord(text[error.start]):04x},"
            " for example from a truncated emoji); write the whole character, or replace it by \\ufffd"
        ) from None


def _too_deep(where: str) -> DataError:
    return DataError(f"{where} is nested more than {MAX_NESTING} levels deep; flatten it")


def to_plain(value: object) -> JsonValue:
    """Convert a value to JSON types at every depth.

    NumPy scalars and arrays, tensors and series become numbers and lists. Decimal and Fraction become int or float, or
    text if a float is not exact. Dates, times, UUIDs and paths become text. Bytes become text if they are UTF-8, else
    base64. Enums become their values, dataclasses and pydantic models mappings, sets lists. NaN and missing values of
    pandas become null, infinities text. Other objects become their `str`.
    """
    if value is None or (isinstance(value, int | str) and type(value) in (bool, int, str)):
        return value
    if isinstance(value, Enum):
        return to_plain(value.value)
    if isinstance(value, float):
        return None if math.isnan(value) else float(value) if math.isfinite(value) else _infinity(value)
    if isinstance(value, Mapping):
        return {_plain_key(key): to_plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain(each) for each in value]
    return _plain_object(value)


def as_json_text(value: object) -> str:
    """Format a value as text for a model: strings unchanged, a top-level NaN as "NaN", other values as JSON."""
    if isinstance(value, Real) and value != value:  # NaN, also of NumPy
        return "NaN"
    plain = to_plain(value)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def _plain_object(value: object) -> JsonValue:
    if isinstance(value, int | str):  # subclasses of int and str
        return int(value) if isinstance(value, int) else str(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return _text_of_bytes(bytes(value))
    if isinstance(value, Decimal | Fraction):
        return _plain_number(value)
    if type(value).__name__ in _MISSING and type(value).__module__.startswith("pandas"):
        return None
    if type(value).__name__ in ("datetime64", "timedelta64"):  # NumPy types; their tolist returns nanoseconds
        return str(value)
    if isinstance(value, date | time) or hasattr(value, "isoformat"):
        return str(value.isoformat())
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: to_plain(getattr(value, each.name)) for each in fields(value)}
    for method in ("tolist", "model_dump"):  # arrays, tensors and series; pydantic models
        if callable(getattr(value, method, None)) and not isinstance(value, type):
            found = getattr(value, method)()
            return str(value) if found is value else to_plain(found)
    return str(value)


def _plain_number(value: Decimal | Fraction) -> int | float | str | None:
    if isinstance(value, Decimal) and not value.is_finite():
        return None if value.is_nan() else _infinity(float(value))
    if isinstance(value, Fraction):
        return value.numerator if value.denominator == 1 else str(value)
    if value == value.to_integral_value() and value.as_tuple().exponent == 0:
        return int(value)
    return float(value) if Decimal(repr(float(value))) == value else str(value)


def _plain_key(key: object) -> str:
    """Convert a mapping key to a string, like json.dumps."""
    plain = to_plain(key)
    return plain if isinstance(plain, str) else json.dumps(plain)


def _text_of_bytes(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return base64.b64encode(value).decode()


def _infinity(value: float) -> str:
    return "Infinity" if value > 0 else "-Infinity"


def without_nulls(value: object) -> object:
    """Remove nulls at every depth. Arrow adds them for struct fields that only other rows use."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [without_nulls(each) for each in value if each is not None]
    return value
