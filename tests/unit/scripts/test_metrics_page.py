"""docs/metrics.md is up to date with the guide."""

from __future__ import annotations

from metrics_page import HEAD, PAGE, page

from mcore_rl.observe.guide.entries import Warned
from mcore_rl.observe.guide.table import ENTRIES


def test_metrics_page_matches_guide() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python scripts/metrics_page.py"


def test_metrics_page_has_condition_of_every_warning_in_its_row() -> None:
    rows = {cells[1].strip(" `"): cells for line in page().splitlines() if len(cells := line.split("|")) > 2}
    for name, entry in ENTRIES.items():
        cells = rows[name][1:-1]
        assert len(cells) == len(HEAD)
        assert all(cell.strip() for cell in cells)
        if isinstance(entry.alert, Warned):
            assert f"**{entry.alert.condition.describe()}**" in cells[2]
