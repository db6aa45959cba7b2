"""Rejection of keys that are set but have no effect."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from mcore_rl.errors import ConfigError

MAX_SHOWN = 60
"""Maximum number of characters of a value in a message."""


class Changed(NamedTuple):
    """Key that is not at its default, with both values formatted."""

    key: str
    value: str
    default: str


def changed(section: str, given: Any) -> Iterator[Changed]:
    """Yield every key that is not at its default in `given`, the dataclass at `section`, and its subsections."""
    yield from _changed(section, given, type(given)())


def reject_unless_default(section: str, given: Any, remedy: str, names: Collection[str] | None = None) -> None:
    """Raise ConfigError for the first key of `names` (default: all keys of the section) that is not at its default.
    `remedy` names the setting with which the key has an effect."""
    for key, value, default in changed(section, given):
        if names is None or key.removeprefix(f"{section}.") in names:
            raise ConfigError(f"{key}={value} has no effect; {remedy}, or leave {key} at {default}")


def _changed(section: str, given: Any, default: Any) -> Iterator[Changed]:
    for field in fields(given):
        key, value, only = f"{section}.{field.name}", getattr(given, field.name), getattr(default, field.name)
        if is_dataclass(value):
            yield from _changed(key, value, only)
        elif value != only:
            yield Changed(key, written(value), written(only))


def written(value: Any) -> str:
    """Format a value for a message."""
    text = "null" if value is None else str(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
