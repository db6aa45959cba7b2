"""JSON without the values that Python accepts beyond the standard: NaN, infinities, and halves of surrogate pairs."""

from __future__ import annotations

import json
import math
import re


def json_value(text: str) -> object:
    """Parse JSON. Raises: ValueError, also for NaN, infinities, and half of a surrogate pair."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
        check_characters(text, value)
        return value
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    """Convert a number. Rejects numbers such as 1e999, which json parses as infinity."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:20]} is beyond the range of a float")
    return value


def check_characters(text: str, value: object) -> None:
    """Raise ValueError for half of a surrogate pair, which neither files nor tokenizers accept."""
    if _HALF.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"\\u{ord(error.object[error.start]):04x} is half of a character") from None


_HALF = re.compile(r"\\u[dD][89a-fA-F]")
# By default, Python's decoder accepts NaN and Infinity, which are not JSON, and reads 1e999 as infinity.
DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)
"""Decoder of a value inside a text; check_characters is up to its caller."""
