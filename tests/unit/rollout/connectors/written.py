"""Rows that `mcore-rl rows` has written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mcore_rl.cli import main

SOLVE = "mcore_rl.rollout.connectors.program:solve"


def rows(out: Path, *words: str) -> list[dict[str, Any]]:
    """Run `mcore-rl rows` with these words and return the rows."""
    assert main(["rows", *words, "--out", str(out)]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]
