"""Typed access to the fields of a request, and tables of the fields that a dialect ignores or refuses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mcore_rl.rollout.gateway.exchange import RefusedError
from mcore_rl.types.json import JsonValue


@dataclass(frozen=True)
class Refused:
    """Field that would change the answer. It is accepted with one of the `neutral` values. `remedy` ends the error."""

    neutral: Sequence[JsonValue] = ()
    remedy: str = "leave it out"


@dataclass(frozen=True)
class FieldTable:
    """Fields of a dialect's request. Fields in no list are ignored, too: clients and proxies add their own.

    read: fields that this dialect interprets.
    ignored: fields without effect on the sampled tokens, or that only the vendor's models or servers understand.
    refused: fields that would change the answer in a way that this server cannot.
    """

    read: frozenset[str]
    ignored: frozenset[str]
    refused: Mapping[str, Refused] = field(default_factory=dict)

    def check(self, body: Mapping[str, JsonValue]) -> None:
        """Raise RefusedError with status 400 for the first refused field."""
        for name, rule in self.refused.items():
            value = body.get(name)
            if value is not None and value not in rule.neutral:
                raise RefusedError(400, f"`{name}` is not supported here; {rule.remedy}")


class Fields:
    """Fields of a JSON object. A null counts as absent. All methods raise RefusedError with status 400, whose text has
    the path of the field."""

    def __init__(self, value: object, path: str = "") -> None:
        if not isinstance(value, dict):
            raise RefusedError(400, f"{path or 'the body'} must be an object, not {_kind(value)}")
        self._values: Mapping[str, JsonValue] = value
        self.path = path

    def name(self, name: str) -> str:
        """Return the path of a field for messages."""
        return f"{self.path}.{name}" if self.path else name

    def get(self, name: str) -> JsonValue:
        """Return a value of any type, None if it is absent."""
        return self._values.get(name)

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string. Without a default it is required."""
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean."""
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        """Return an integer of [low, high]."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.wrong(name, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        """Return a number of [low, high]."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            raise self.wrong(name, f"a number from {low:g} to {high:g}")
        return float(value)

    def texts(self, name: str) -> tuple[str, ...] | None:
        """Return one string or a list of strings, none of them empty."""
        value = self._values.get(name)
        if value is None:
            return None
        found = value if isinstance(value, list) else [value]
        if not all(isinstance(each, str) and each for each in found):
            raise self.wrong(name, "a string or a list of strings that are not empty")
        return tuple(str(each) for each in found)

    def mapping(self, name: str) -> Fields | None:
        """Return the fields of an object."""
        value = self._values.get(name)
        return None if value is None else Fields(value, self.name(name))

    def objects(self, name: str) -> Iterator[Fields]:
        """Yield the fields of the objects in a list."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, list):
            raise self.wrong(name, "a list of objects")
        for place, each in enumerate(value or ()):
            yield Fields(each, f"{self.name(name)}[{place}]")

    def wrong(self, name: str, wanted: str) -> RefusedError:
        """Return the error for a field of another type or range."""
        return RefusedError(400, f"{self.name(name)} must be {wanted}, not {_kind(self._values.get(name))}")


def _kind(value: object) -> str:
    if value is None:
        return "absent"
    if isinstance(value, bool | int | float):
        return str(value)[:20].lower()
    names: Mapping[type, str] = {str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)
