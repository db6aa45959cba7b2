"""Reading of the blocks of a written report."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mcore_rl.observe.report.pages import decode
from mcore_rl.observe.report.write import write_report


def blocks_of(*run_dirs: Path) -> dict[str, Any]:
    """Write a report. Returns the contents of its blocks by name."""
    text = write_report(run_dirs).read_text(encoding="utf-8")
    found = re.findall(r'<script type="text/plain" data-block="([^"]+)">([^<]*)</script>', text)
    return {name: decode(block) for name, block in found}


def run_of(*run_dirs: Path) -> dict[str, Any]:
    """Write a report. Returns the first run's entry in its summary."""
    run: dict[str, Any] = blocks_of(*run_dirs)["summary"]["runs"][0]
    return run


def alerts_of(run_dir: Path) -> list[str]:
    return [alert["text"] for alert in run_of(run_dir)["alerts"]]
