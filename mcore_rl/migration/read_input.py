"""Result of reading a launch script or configuration of another trainer."""

from __future__ import annotations

from dataclasses import dataclass, field

from mcore_rl.migration.source import Setting


@dataclass
class ReadInput:
    """Settings of a run. command: the line and program that were read. notes: parts of the script that were not."""

    settings: dict[str, Setting]
    command: str
    notes: list[str] = field(default_factory=list)
