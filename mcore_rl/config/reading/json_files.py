"""JSON files of a directory that a configuration key names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mcore_rl.errors import ConfigError

MAX_DIGITS = 300
"""Digits of an integer that a float can represent. Files do have integers of 31 digits, for an unlimited length."""


def read_json_object(path: Path, key: str) -> dict[str, Any]:
    """Read the JSON object in `path`.

    Raises: ConfigError naming `key` if the file cannot be read or contains something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_int=_integer)
    except (OSError, ValueError, RecursionError) as error:  # RecursionError: too many nested brackets
        raise ConfigError(f"{key}: {path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{key}: {path} must hold a JSON object")
    return content


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"it has an integer of {len(digits)} digits")
    return int(digits)
