"""Configuration under translation: keys with values and origins, and the lists of differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from mcore_rl.config.fields import leaves
from mcore_rl.config.schema import Config
from mcore_rl.migration.shell.words import UNKNOWN
from mcore_rl.migration.source import Setting, Source, unknown_remedy


@dataclass(frozen=True)
class Row:
    """One key of ours that one key of the source determines.

    theirs: names of the source's key, the current one first. convert: value of ours; it returns SKIP if our default
    applies, and None for a value without counterpart.
    """

    ours: str
    theirs: tuple[str, ...]
    convert: Callable[[object], object] | None = None


@dataclass
class Draft:
    """Translated configuration.

    values: our keys with values. origins: comment of each. changes: differences in meaning. defaults: keys that have
    the source's default because ours differs. blockers: settings that change what is trained and have no counterpart.
    choices: keys that the user has to decide.
    """

    values: dict[str, object] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)
    defaults: list[str] = field(default_factory=list)
    blockers: list[str] = field(default_factory=list)
    choices: list[str] = field(default_factory=list)

    def set(self, key: str, value: object, origin: str) -> None:
        """Set one of our keys; `origin` becomes the comment of its line."""
        self.values[key], self.origins[key] = value, origin

    def take(self, source: Source, key: str, value: object, *theirs: str, note: str = "") -> None:
        """Set our `key` to `value`, which comes from the keys `theirs`: from the run, or from the source's defaults. A
        default that equals ours needs no line."""
        found = source.find(*theirs)
        if found is not None and not _is_readable(key, value):
            source.reject(found, "a value", value)
        elif found is not None:
            self.set(key, value, f"{found.origin}{note and f': {note}'}")
        elif value != OUR_DEFAULTS.get(key):
            name = source.effective(*theirs).key
            self.set(key, value, f"default of {source.trainer}'s {name}{note and f': {note}'}")
            self.defaults.append(
                f"{key} = {_written(value)}, {source.trainer}'s default of {name}; ours is "
                f"{_written(OUR_DEFAULTS.get(key))}"
            )

    def apply(self, source: Source, rows: Iterable[Row]) -> None:
        """Translate rows. A value that a conversion does not know is a blocker; null stands for our default."""
        for row in rows:
            setting = source.effective(*row.theirs)
            if setting.value is None:
                continue
            value = setting.value if row.convert is None else row.convert(setting.value)
            if value is None:
                self.block(setting, f"no counterpart of this value for {row.ours}{unknown_remedy(str(setting.value))}")
            elif value is not SKIP:
                self.take(source, row.ours, value, *row.theirs)

    def drop(self, *prefixes: str) -> None:
        """Remove keys that begin with one of `prefixes`."""
        for key in [key for key in self.values if key.startswith(prefixes)]:
            del self.values[key], self.origins[key]
            self.defaults = [line for line in self.defaults if not line.startswith(f"{key} = ")]

    def integer(self, key: str) -> int:
        """Return the value of an integer key, or our default; 0 for null and values of another kind."""
        value = self.values.get(key, OUR_DEFAULTS.get(key))
        return int(value) if isinstance(value, int | float) and math.isfinite(value) else 0

    def block(self, setting: Setting, reason: str) -> None:
        """Add a setting that cannot be translated and changes what is trained."""
        place = "" if setting.line is None else f" (line {setting.line})"
        self.blockers.append(f"{setting.shown}{place}: {reason}")


class Translation(NamedTuple):
    """Result of a translation. uncovered: lines about keys without counterpart."""

    source: Source
    draft: Draft
    uncovered: list[str]


OUR_DEFAULTS: dict[str, object] = {leaf.key: leaf.value for leaf in leaves(Config())}
PATHS = {leaf.key for leaf in leaves(Config()) if leaf.domain.path or leaf.domain.function}
SKIP = object()
"""Result of a conversion if our default applies."""


def _is_readable(key: str, value: object) -> bool:
    """Return True unless the value has parts that only the shell knows. Paths may have environment variables, which are
    expanded when the configuration is read, but no arguments such as $1."""
    texts = value if isinstance(value, list) else [value]
    parts = [part for text in texts if isinstance(text, str) for part in UNKNOWN.finditer(text)]
    named = all(part[1] is not None and not part[1].isdigit() for part in parts)
    return not parts or (key in PATHS and named)


def _written(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
