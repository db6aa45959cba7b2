"""Default of run.dir: a new directory for each start, with the name of the configuration and the time."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

PLACEHOLDERS = ("{name}", "{date}", "{time}")


def is_template(run_dir: str) -> bool:
    """Return True if the value of run.dir has a placeholder."""
    return any(each in run_dir for each in PLACEHOLDERS)


def filled(run_dir: str, files: Sequence[str], now: datetime) -> str:
    """Replace {name} by the names of the configuration files without endings, joined by `-`, and {date} and {time} by
    `now`: runs/base-model-2026-11-26-150301."""
    name = "-".join(Path(file).stem for file in files)
    for placeholder, text in zip(PLACEHOLDERS, (name, f"{now:%Y-%m-%d}", f"{now:%H%M%S}"), strict=True):
        run_dir = run_dir.replace(placeholder, text)
    return run_dir
