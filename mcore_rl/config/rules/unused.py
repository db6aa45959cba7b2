"""Keys that are set and then have no effect: refused, so that nobody believes they had one."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from mcore_rl.errors import ConfigError

MAX_SHOWN = 60
"""Characters of a value in a message."""


class Changed(NamedTuple):
    """A key that is not at its default, both values as they would be written."""

    key: str
    value: str
    default: str


def changed(section: str, given: Any) -> Iterator[Changed]:
    """Every key of `given`, the dataclass at `section`, and of the sections in it, that is not at its default."""
    yield from _changed(section, given, type(given)())


def refuse_unless_default(section: str, given: Any, remedy: str, names: Collection[str] | None = None) -> None:
    """Raises: ConfigError for the first of `names` (default: all of them) in the section that is not at its default;
    `remedy` says what to set for it to have an effect."""
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
    """A value as a message shows it."""
    text = "null" if value is None else str(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
