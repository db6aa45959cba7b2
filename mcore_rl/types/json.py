"""Types of values that come from JSON text or can be written as JSON text."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

JsonValue: TypeAlias = "str | int | float | bool | Sequence[JsonValue] | Mapping[str, JsonValue] | None"

# A parsed object that its owner may change. A function that only reads takes Mapping[str, JsonValue]:
# dict is invariant in its values, so a dict[str, int] is not a JsonObject.
JsonObject: TypeAlias = dict[str, JsonValue]
