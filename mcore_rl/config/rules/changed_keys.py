"""Rejection of keys that are set but have no effect."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, NamedTuple

from mcore_rl.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MAX_SHOWN = 60
"""Maximum number of characters of a value in a message."""


class Changed(NamedTuple):
    """Key that is not at its default, with both values formatted."""

    key: str
    value: str
    default: str


def changed(section: str, given: DataclassInstance, default: DataclassInstance | None = None) -> Iterator[Changed]:
    """Yield every key that is not at its default in `given`, the dataclass at `section`, and its subsections."""
    # Defaults of subsections come from their parent: CriticConfig overrides those of its optimizer.
    default = type(given)() if default is None else default
    for field in fields(given):
        key, value, only = f"{section}.{field.name}", getattr(given, field.name), getattr(default, field.name)
        if is_dataclass(value) and not isinstance(value, type):
            yield from changed(key, value, only)
        elif value != only:
            yield Changed(key, written(value), written(only))


def reject_unless_default(
    section: str, given: DataclassInstance, remedy: str, names: Collection[str] | None = None
) -> None:
    """Raise ConfigError for the first key of `names` (default: all keys of the section) that is not at its default.
    `remedy` names the setting with which the key has an effect."""
    for key, value, default in changed(section, given):
        if names is None or key.removeprefix(f"{section}.") in names:
            raise ConfigError(f"{key}={value} has no effect; {remedy}, or leave {key} at {default}")


def written(value: object) -> str:
    """Format a value for a message."""
    text = "null" if value is None else str(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
