"""Types of values that come from JSON text or can be written as JSON text."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from mcore_rl.errors import ConfigError

JsonValue: TypeAlias = "str | int | float | bool | Sequence[JsonValue] | Mapping[str, JsonValue] | None"

# A parsed object that its owner may change. A function that only reads takes Mapping[str, JsonValue]:
# dict is invariant in its values, so a dict[str, int] is not a JsonObject.
JsonObject: TypeAlias = dict[str, JsonValue]


def read_json_object(path: Path, key: str) -> JsonObject:
    """Read the JSON object in `path`.

    Raises: ConfigError naming `key` if the file cannot be read or contains something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # RecursionError: too many nested brackets
        raise ConfigError(f"{key}: {path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{key}: {path} must hold a JSON object")
    return content
