"""Lists of keys without counterpart, grouped by reason."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping

from mcore_rl.config.reading.unknown_keys import nearest
from mcore_rl.migration.draft import OUR_DEFAULTS
from mcore_rl.migration.source import Setting

MAX_NAMED = 3
"""Maximum number of keys that a line names."""


def grouped_lines(settings: Iterable[Setting], reasons: Mapping[str, str]) -> list[str]:
    """Return one line per reason, then one per setting that no pattern matches.

    reasons: reason -> patterns of keys, separated by blanks; the first match counts.
    """
    groups: dict[str, list[Setting]] = {}
    unknown: list[str] = []
    for setting in settings:
        name = setting.key.removeprefix("--")
        reason = next((text for text, patterns in reasons.items() if matches(name, patterns.split())), None)
        if reason is None:
            similar = nearest(name, list(OUR_DEFAULTS))
            hint = "" if similar is None else f"; {similar} has a similar name"
            unknown.append(f"{setting.shown}: not known to this importer{hint}")
        else:
            groups.setdefault(reason, []).append(setting)
    return [_line(reason, each) for reason, each in groups.items()] + unknown


def matches(key: str, patterns: Iterable[str]) -> bool:
    """Return True if one of the patterns matches the key."""
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def _line(reason: str, settings: list[Setting]) -> str:
    shown = ", ".join(setting.key for setting in settings[:MAX_NAMED])
    more = f" and {len(settings) - MAX_NAMED} more" if len(settings) > MAX_NAMED else ""
    return f"{shown}{more}: {reason}"
