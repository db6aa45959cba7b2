"""Lists of differences between another trainer's run and its translation."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

from mcore_rl.migration.draft import Draft


@dataclass(frozen=True)
class Report:
    """Result of an import. uncovered: keys without counterpart. notes: parts of the script that were not read.
    rejection: message of the rules of `plan`; None if they accept the configuration."""

    draft: Draft
    uncovered: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    rejection: str | None = None

    def as_text(self, target: str) -> str:
        """Format the lists. `target`: the configuration's file."""
        lists = {
            "to decide": self.draft.choices,
            "left out by --force, although they change the training": self.draft.blockers,
            "different meaning": self.draft.changes,
            "different defaults, written into the configuration": self.draft.defaults,
            "without counterpart": self.uncovered,
            "parts of the script that were not followed": self.notes,
        }
        lines = [line for title, items in lists.items() for line in _section(title, items)]
        if self.rejection is not None:
            lines += ["", f"`mcore-rl plan` rejects it until this is changed: {self.rejection}"]
        lines += ["", f"next: mcore-rl plan {shlex.quote(target)} model.hf_path=DIRECTORY_WITH_CONFIG_JSON"]
        return "\n".join(lines).lstrip("\n")


def _section(title: str, items: list[str]) -> Iterator[str]:
    if items:
        yield ""
        yield f"{title} ({len(items)}):"
        yield from (f"  - {item}" for item in items)
